"""Where a weight version travels: from the trainer to every instance, by the object store.

Lives here: the first weights and every later version, confirmed by each instance.
Must not live here: packing (`engine.weights.chunks`), broadcasts (`cluster.system`), checkpoints (`cluster.resume`).
"""
