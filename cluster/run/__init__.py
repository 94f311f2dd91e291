"""The RL loop: samples are asked for, collected, scored and learned from, one iteration after the other.

Lives here: the iteration, what lies between the instances and the trainer, evaluation, draft training in a run.
Must not live here: which samples decode when (`policies`), actors and their places (`cluster.system`).
"""
