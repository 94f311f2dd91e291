"""The loop's side of scheduling: the client of the scheduler actor, the pool of instances.

Lives here: starting, replacing and asking scheduler and instances.
Must not live here: the scheduler's decisions (`policies.scheduling`).
"""
