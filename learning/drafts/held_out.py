"""What a drafter is judged on, and how fast it learns after that: too high a rate costs some versions and not the run.

Of a model and of a head alike one piece of data in so many is never learned from. What was learned is taken if it is
no worse there than what is published; else it is given up, and learning goes on at half the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

HOLD_OUT_EVERY = 8
"Of groups of samples, or of sequences as they arrive."
AFTER_FAILURE = 0.5
AFTER_SUCCESS = 1.5


def is_held_out(index: int) -> bool:
    """Whether the index-th piece, from 0, is held out: of few the first."""
    return index % HOLD_OUT_EVERY == 0


def is_no_worse(tried: float, present: float) -> bool:
    """Whether weights are taken, by their loss on what is held out; not by one that is not finite."""
    return tried <= present


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
