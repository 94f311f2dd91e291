"""Learning from given text: supervised fine-tuning, reward models from preference pairs.

Lives here: losses, batches and steps over examples that nobody sampled.
Must not live here: rollouts (`learning.trainer.learner`).
"""
