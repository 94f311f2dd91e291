"""Draft models and draft heads: made, trained beside a run, evaluated.

Lives here: features and soft targets, a head as a module, the losses, refit and co-training, making one for a target.
Must not live here: files and drafting of a head (`engine.drafters`), what the target learns (`learning.training`).
"""
