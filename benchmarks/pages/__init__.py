"""Writes the tables of `docs/benchmarks/` and the README from the results: `python -m rlhfspec.benchmarks.pages`."""
