"""Commands of `rlhfspec`: typed functions, of which `declare` makes the command line.

Lives here: arguments, help texts, exit codes, the reference page.
Must not live here: what a command does; each calls one function elsewhere.
"""
