"""Simulation: the run's own policies on instances of rate curves, and whole clusters from data sheets.

Lives here: the event-driven simulation, workloads, analytic devices (from data sheets, not measured).
Must not live here: decisions of real runs; the policies tried are those of `policies.reallocation` itself.
"""
