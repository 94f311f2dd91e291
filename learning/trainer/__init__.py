"""The trainer: from rollouts as tensors to new weights, alone or as one of several.

Lives here: packing, forwards, precision, the order of an update, gradients summed, weights sharded, its state.
Must not live here: losses and advantages (`learning.objectives`), Ray (`actors.workers`).
"""
