"""The run folder: everything a run leaves behind, written whole or not at all.

Lives here: its layout, status, rollouts, moves, the identity of its writer, what dead runs left.
Must not live here: checkpoints (`cluster.weights`), what is shown (`cluster.reporting`).
"""
