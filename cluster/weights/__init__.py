"""Where a weight version travels: from the trainer to every instance, and to a checkpoint.

Lives here: publication, confirmed by each instance; Hugging Face checkpoints.
Must not live here: packing into chunks (`engine.weights.chunks`).
"""
