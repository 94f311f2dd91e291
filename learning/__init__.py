"""The learner: PPO and GRPO updates, advantages and losses, prompts and their keys, refits of the draft model.

Lives here: what turns finished rollouts into new weights; tasks and rewards in `tasks`, model making in `pairs`.
Must not live here: generation (`engine`), Ray (`actors`).
"""
