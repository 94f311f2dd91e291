"""What `rlhfspec gpu-selftest` measures, each part on a device given by its caller."""
