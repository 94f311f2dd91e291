"""Reallocation policies on simulated instances: rate curves instead of models (design 3.3)."""
