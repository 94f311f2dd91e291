"""Code that a model wrote, run where it can do no harm.

Lives here: a process with limits and namespaces of its own, programs in it, tests of programs, a tool.
Must not live here: rewards (`learning.rewards`), the user's own functions, which are trusted.
"""
