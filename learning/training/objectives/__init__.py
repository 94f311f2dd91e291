"""What is learned: advantages, losses, KL control, off-policy corrections, PPO's critic, supervised objectives.

Lives here: the formulas of PPO, GRPO and kin and of supervised training, each beside its paper.
Must not live here: the model that learns, its optimizer and its forwards (`learning.training`).
"""
