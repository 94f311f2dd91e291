"""What is known of a run before it starts, made once and frozen (`RunPlan`); whoever runs later reads it.

Lives here: reading and checking config, models and data; shapes, memory, topology; the specs of all actors.
Must not live here: anything that needs a running system.
"""
