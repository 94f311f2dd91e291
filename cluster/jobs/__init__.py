"""What the command line runs beside RL: supervised training, evaluation, draft heads, a reward server.

Lives here: what is read before, where the job runs, what its folder holds.
Must not live here: how it learns (`learning`), commands (`cluster.commands`).
"""
