"""Actors that learn and judge: trainers, rewards, environments.

Lives here: thin Ray shells around `learning`.
Must not live here: generation (`actors.generation`), waiting (`actors.remote`).
"""
