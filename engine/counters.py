"""Running sums of one engine."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..core.decode_records import GenerationStats, StepRecord

_OF_STEP = {field.name for field in fields(GenerationStats)} & {field.name for field in fields(StepRecord)}
"Sums of what every decode step has by the same name."


class Tally:
    """`GenerationStats` in the making. Every decode step adds to it: copies would take longer than what they count."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {field.name: field.default for field in fields(GenerationStats)}

    def add(self, **values: int | float) -> None:
        """Add to some sums, by the names of GenerationStats. Raises KeyError for another name."""
        for name, value in values.items():
            self._sums[name] += value

    def add_step(self, record: StepRecord, num_completions: int) -> None:
        """Add a decode step that ended so many samples."""
        self.add(num_decode_steps=1, num_sample_steps=record.num_samples, num_completions=num_completions)
        self.add(**{name: getattr(record, name) for name in _OF_STEP})

    def __getitem__(self, name: str) -> Any:
        """One sum as of now."""
        return self._sums[name]

    @property
    def stats(self) -> GenerationStats:
        """All of them as of now."""
        return GenerationStats(**self._sums)
