"""Our engine and our training in other people's hands: under their trainers, and as classes of Python.

Lives here: `trl`, for TRL's GRPOTrainer; `trainer_classes`, `finished_run`, `engine_in_process`: names of `rlhfspec`.
Must not live here: imports of those trainers, which need not be installed; a second way to plan or run.
"""
