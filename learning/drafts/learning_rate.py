"""How fast a drafter learns after what it learned was taken or given up: too high a rate costs some versions."""

from __future__ import annotations

from dataclasses import dataclass

AFTER_FAILURE = 0.5
AFTER_SUCCESS = 1.5


@dataclass(slots=True)
class LearningRate:
    """Half as high after each failure, up again after each success, never above what is configured."""

    full: float
    "as configured"
    scale: float = 1.0

    @property
    def now(self) -> float:
        """Of the next step, behind the warm-up."""
        return self.full * self.scale

    def taken(self) -> None:
        """What was learned is the next version."""
        self.scale = min(1.0, self.scale * AFTER_SUCCESS)

    def given_up(self) -> None:
        """It was worse, or not finite."""
        self.scale *= AFTER_FAILURE
