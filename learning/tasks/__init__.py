"""Tasks: where prompts come from and how responses are scored.

Lives here: the reward function protocol, the embedded tasks, reward models, users' own functions.
Must not live here: pools of reward actors (`actors.reward_actors`).
"""
