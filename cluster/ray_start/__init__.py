"""Where a run lives: its Ray cluster and this machine.

Lives here: starting and joining Ray, which tree runs, what this machine has.
Must not live here: what the actors do; the slots of instances (`cluster.system.placement_slots`).
"""
