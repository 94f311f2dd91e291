"""What processes hold: `bench.py` measures it."""
