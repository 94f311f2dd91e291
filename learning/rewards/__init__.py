"""Rewards: the protocol, reward models, users' own functions.

Lives here: a response in, a number with its parts out.
Must not live here: embedded tasks (`learning.tasks`), pools of reward actors (`actors`).
"""
