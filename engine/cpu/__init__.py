"""Code of our own for one CPU thread: whole forwards, attention and sampling in one call each (decisions 0009, 0010).

Lives here: functions written as LLVM IR, their compilation, the tables of operations that run them.
Must not live here: anything that a GPU needs; every function has a torch counterpart elsewhere in `engine`.
"""
