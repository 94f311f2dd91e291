"""Training under faults that are injected from outside, and what of it differs from undisturbed training.

Lives here: what is killed or frozen, and when; how two run folders are compared.
Must not live here: how a run bears it (`cluster`).
"""
