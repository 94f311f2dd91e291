"""Where a run lives: its Ray cluster, its bundles and actors' resources, the machine's memory.

Lives here: starting and joining Ray, topology, the memory plan, what this machine has.
Must not live here: what the actors do.
"""
