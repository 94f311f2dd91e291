"""The actors of a run, as the driver sees them: started, asked, replaced.

Lives here: the scheduler's client, the pool of instances, the trainers, what happens when a machine is lost.
Must not live here: the scheduler's decisions (`policies.scheduling`), the loop (`cluster.run`).
"""
