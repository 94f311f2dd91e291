"""The lossless rule: which token the target samples at a position, and how a draft tree is verified against it.

Lives here: the noise, the sampling rule, draft trees, verification, the running batch, log-probabilities.
Must not live here: who proposes drafts (`engine.drafters`), how logits are computed (`engine.model`).
"""
