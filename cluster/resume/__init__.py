"""How a run goes on after it was cut off, with the result that it would have had.

Lives here: checkpoints, the state of a run between two iterations, reading it back, clearing away what came after it.
Must not live here: how a run ends (`cluster.run`).
"""
