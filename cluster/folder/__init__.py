"""The run folder: everything a run leaves behind, written whole or not at all.

Lives here: its layout, status, rollouts, logs, samples, other trackers, the identity of its writer.
Must not live here: states and checkpoints (`cluster.resume`), what is shown (`cluster.observe`).
"""
