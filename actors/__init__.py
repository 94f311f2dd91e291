"""Thin Ray shells around the engine, the learner and the rewards."""
