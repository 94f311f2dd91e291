"""How far generation runs ahead of learning: which samples decode in which phase, and how far.

Lives here: the plan of phases, pure.
Must not live here: what carries it out (`cluster.run`).
"""
