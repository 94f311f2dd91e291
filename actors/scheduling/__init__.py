"""The scheduler's actor: a thin shell around the decisions.

Lives here: the actor, what it tells the driver, what it knows of instances.
Must not live here: the decisions (`policies.scheduling`), generation (`actors.generation`).
"""
