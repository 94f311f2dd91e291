"""Where a run lives: its Ray cluster, the places of its instances, this machine.

Lives here: starting and joining Ray, places that come and go, what this machine has.
Must not live here: what the actors do.
"""
