"""A draft head on the target's hidden states (EAGLE-3, arXiv 2503.01840): files, forward, drafter."""
