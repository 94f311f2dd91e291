"""Other projects' own code as the judge of ours: run by hand, in an environment that has them; numbers are frozen.

Lives here: scripts that write what tests compare with.
Must not live here: anything that a test or a benchmark imports to run.
"""
