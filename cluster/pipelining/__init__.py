"""Generation ahead of learning: samples between the instances and the trainer.

Lives here: what holds them, and how a state of the run keeps them.
Must not live here: which samples decode when (`policies.pipelining`), the iteration itself (`cluster.iterations`).
"""
