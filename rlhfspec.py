"""A checkout on the path answers to the package's name, without an install (`ray job submit --working-dir .`)."""

__path__ = [__file__.removesuffix("rlhfspec.py")]
