"""Several trainers that learn as one: rows shared out, gradients summed, weights replicated or sharded.

Lives here: the process group of the trainers, what they tell each other, checkpoints that all of them write.
Must not live here: losses and the order of an update (`learning.learner`), Ray (`actors.trainer_actor`).
"""
