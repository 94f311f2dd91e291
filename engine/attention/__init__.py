"""Attention over cached keys and values: the same function by torch, by xformers, and as an oracle for tests.

Lives here: who sees which position, the batch layout of attention, its implementations for any device.
Must not live here: the memory of the cache (`engine.cache`), projections and layers (`engine.model`).
"""
