"""Weights of a model: loaded from a folder, checked, packed into checksummed chunks and unpacked.

Lives here: loading of models and tokenizers, checks of weight files, chunks for publication.
Must not live here: who sends weights to whom (`cluster.weights`), checkpoints of a run (`cluster.resume`).
"""
