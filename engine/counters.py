"""Running sums of one engine."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from core.records import GenerationStats


class Tally:
    """`GenerationStats` in the making. Every decode step adds to it: copies would take longer than what they count."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {field.name: field.default for field in fields(GenerationStats)}

    def add(self, **values: int | float) -> None:
        """Add to some sums, by the names of GenerationStats. Raises KeyError for another name."""
        for name, value in values.items():
            self._sums[name] += value

    def __getitem__(self, name: str) -> Any:
        """One sum as of now."""
        return self._sums[name]

    @property
    def stats(self) -> GenerationStats:
        """All of them as of now."""
        return GenerationStats(**self._sums)
