"""A draft head on the target's hidden states (EAGLE-3, arXiv 2503.01840): files, forward, drafter.

Lives here: a head's weights and files, what a sequence gives it to learn from, drafting with it.
Must not live here: training (`learning.heads`).
"""
