"""Environments: what answers a policy between the turns of an episode.

Lives here: the protocol, its loading by import path, how answers become tokens, an episode's bookkeeping, examples.
Must not live here: actors that run environments (`actors.workers.environment_actors`), decoding (`engine`).
"""
