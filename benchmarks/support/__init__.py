"""What the benchmarks share: workloads, the reference, results."""
