"""A checkout on the path answers to the package's name, without an install (`ray job submit --working-dir .`)."""

__path__ = [__file__.removesuffix("rlhfspec.py")]

from rlhfspec.__init__ import __all__, __dir__, __getattr__  # noqa: F401
