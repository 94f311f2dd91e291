"""A draft head on the target's hidden states (EAGLE-3, arXiv 2503.01840).

Lives here: the head's files and weights, its forward, the drafter that grows trees from it, what it learns from.
Must not live here: how a head is trained (`learning.drafts`), how hidden states leave a forward (`engine.model`).
"""
