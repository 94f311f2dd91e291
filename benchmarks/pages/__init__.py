"""Writes `docs/benchmarks/` and the README's figures from `benchmarks/results/`: `python -m benchmarks.pages`."""
