"""The learner: PPO and GRPO updates, advantages and losses, prompts and their keys, refits of the draft model.

Lives here: finished rollouts into new weights; computing in `forward`, rewards in `tasks`, making models in `pairs`.
Must not live here: generation (`engine`), Ray (`actors`).
Order of rooms: tasks <- data <- rewards <- environments <- training <- drafts <- models
"""
