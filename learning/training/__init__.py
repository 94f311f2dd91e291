"""The trainer: from rollouts, or given items, to new weights, alone or as one of several.

Lives here: packing, forwards, precision, the order of an update, gradients summed, weights sharded, state, checkpoints.
Must not live here: losses and advantages (`learning.training.objectives`), Ray (`actors.workers`).
"""
