"""One published figure beside the simulated one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A speed-up as published and as simulated."""

    name: str
    published: float
    simulated: float
    "with every unknown input at a value that was set beforehand"
    low: float
    high: float
    "over the range of what is not published"
    known: bool
    "whether every input that matters is published"
    matters: str
    "what is published, and what is not: its range"

    @property
    def deviation(self) -> float:
        """Simulated over published, less one."""
        return self.simulated / self.published - 1.0

    @property
    def outside(self) -> float:
        """How far the published figure lies outside the range, as a share of it; 0 within."""
        return max(self.low / self.published - 1.0, 1.0 - self.high / self.published, 0.0)

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"deviation": self.deviation, "outside": self.outside}


def ranged(
    name: str,
    published: float,
    simulated: float,
    others: Sequence[float],
    *,
    matters: str,
    known: bool = False,
) -> Row:
    """A row whose range is that of all these values."""
    values = [simulated, *others]
    return Row(
        name=name,
        published=published,
        simulated=simulated,
        low=min(values),
        high=max(values),
        known=known,
        matters=matters,
    )
