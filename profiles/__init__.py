"""Measured cost and acceptance models of decoding (tables, fits, provenance)."""
