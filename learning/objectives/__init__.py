"""What is learned: advantages, losses, KL control, off-policy corrections; pure functions of tensors.

Lives here: the formulas of PPO, GRPO and kin and of supervised training, each beside its paper.
Must not live here: models, optimizers, forwards (`learning.trainer`).
"""
