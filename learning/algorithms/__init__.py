"""What is learned from rollouts: advantages, losses, KL control, off-policy corrections; pure functions of tensors.

Lives here: the formulas of PPO, GRPO and kin, each beside its paper.
Must not live here: models, optimizers, forwards (`learning.learner`, `learning.forward`).
"""
