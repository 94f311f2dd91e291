"""Rewards by Ray Serve: the deployment, what travels over HTTP, the side that asks.

Lives here: the reward server and its client; one server serves many runs.
Must not live here: how a response is scored (`learning.rewards`), the run's own pool (`actors.workers.reward_actors`).
"""
