"""A cluster that is not here, from data sheets or a profile: seconds of rollout, update and publication, and memory.

Lives here: dimensions, data sheets, the roofline, training costs, the pipeline of bounded staleness, sweeps.
Must not live here: policies of any kind; the rollout is `policies.simulate.simulation` under those of real runs.
"""
