"""How many instances the generation pool should have: one more where it pays, one less where it is not missed.

Lives here: the forecast of a rollout over the number of instances, the rule, the policy that keeps what was seen.
Must not live here: starting and ending instances (`cluster.system`), who owns samples (`policies.scheduling`).
"""
