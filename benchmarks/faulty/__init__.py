"""Training under faults that are injected from outside, and what of it differs from undisturbed training.

Lives here: what is killed, frozen, cut or filled, and when; how two run folders are compared; what that adds up to.
Must not live here: how a run bears it (`cluster`).
"""
