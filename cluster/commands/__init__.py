"""Sub-commands of `rlhfspec`, one module each: `add_parser` describes it, `run` does it."""
