"""Supervised training from the command line: `rlhfspec sft` and `rlhfspec train-reward`.

Lives here: what is read before, where the job runs, what its folder holds.
Must not live here: how it learns (`learning.supervised`), commands (`cluster.commands`).
"""
