"""Reallocation policies on simulated instances: rate curves instead of models.

Lives here: the event-driven simulation, workloads, analytic devices (from data sheets, not measured).
Must not live here: decisions of real runs; the policies tried are those of `policies.reallocation` itself.
"""
