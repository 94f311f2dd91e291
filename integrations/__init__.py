"""Our engine under other people's trainers, whose scripts stay as they are but for one line.

Lives here: `trl`, for TRL's GRPOTrainer.
Must not live here: imports of those trainers, which need not be installed.
"""
