"""Writes the tables of `docs/benchmarks/` and the README from the result files: `python -m benchmarks.pages`."""
