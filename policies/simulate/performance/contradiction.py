"""Values that are good each by itself, and cannot be together."""

from __future__ import annotations

from core.errors import ConfigError


class ContradictionError(ConfigError):
    """No fault of a sweep: it goes on with the other combinations."""
