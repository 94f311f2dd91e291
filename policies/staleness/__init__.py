"""What instances may be asked for under a weight version, and what an update takes.

Lives here: the schedules, pure, and the samples between instances and trainer.
Must not live here: what carries them out (`cluster.run`).
"""
