"""A generation instance: one actor, one engine, one decode loop that is the only writer of its state.

Lives here: the actor, its decode loop, the engine's host, gauges and trace events.
Must not live here: the migration protocol (`actors.migration`), decoding itself (`engine`).
"""
