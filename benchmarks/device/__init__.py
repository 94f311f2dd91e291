"""What a decode step asks of a GPU, counted without one (`benchmarks/device_ops.py`)."""
