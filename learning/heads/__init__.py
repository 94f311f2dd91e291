"""Draft heads on the target's hidden states (EAGLE-3, arXiv 2503.01840): made, trained and evaluated.

Lives here: a head as a module, the unrolled loss, its trainer, the buffer of features, making one for a target.
Must not live here: files and drafting of a head (`engine.drafters.head`).
"""
