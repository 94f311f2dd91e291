"""How a model that learns computes: packing, attention over packs, precision, logits and log-probabilities.

Lives here: everything between rollouts as tensors and numbers a token.
Must not live here: losses, advantages, optimizers (`learning`).
"""
