"""Sub-commands of `rlhfspec`, one module each: `add_parser` describes it, `run` does it.

Lives here: arguments, help texts, exit codes.
Must not live here: what a command does; each calls one function elsewhere.
"""
