"""The learner: PPO and GRPO updates, advantages and losses, prompts and their keys, refits of the draft model.

Lives here: finished rollouts into new weights: data, rewards, environments, training, draft models, making models.
Must not live here: generation (`engine`), Ray (`actors`).
Rooms (imports go left): tasks <- data <- sandbox <- rewards <- environments <- training <- drafts <- models
"""
