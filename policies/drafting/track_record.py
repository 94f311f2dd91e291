"""What shapes of drafts deliver over what was expected of them: settles what the models get wrong about a whole shape.

A tree's hidden costs, a chain's early stops. Most of what the models get wrong at a batch size they get wrong for every
shape of draft, so that a shape not tried there is believed to share three quarters of it: else whatever has not been
tried looked best wherever drafts deliver less than expected. Plain decoding stands for itself, and has the benefit of
the doubt where little is known of it: a model that is wrong by a few percent must not keep it from being tried.
"""

from __future__ import annotations

from dataclasses import dataclass

RANGE = (0.85, 1.15)
"Acceptance and costs have corrections of their own: this one is for the rest."
PRIOR_STEPS = 10.0
"Decode steps that what is believed of an untried shape counts for."
DECAY = 0.99
UNUSED_DECAY = 0.995
"Of the record of a shape, while another is used on batches of this size."
COMMON = 0.75
"Of the logarithm of what drafts deliver over what was expected."
DOUBT = 0.1
"What plain decoding is overrated by where it has not been tried."


@dataclass(slots=True)
class _Steps:
    """Sums over decode steps, in steps as they were expected to be."""

    delivered: float = 0.0
    expected: float = 0.0

    def fade(self, share: float) -> None:
        self.delivered *= share
        self.expected *= share

    def ratio(self, untried: float) -> float:
        return (self.delivered + PRIOR_STEPS * untried) / (self.expected + PRIOR_STEPS)


class TrackRecord:
    """Tokens over those expected, by batch size (in powers of two) and branching; decayed sums."""

    def __init__(self, *, doubt: float = DOUBT) -> None:
        """Begin with nothing known; `doubt` is what plain decoding is overrated by then."""
        self._doubt = doubt
        self._steps: dict[int, dict[int, _Steps]] = {}

    def factor(self, branching: int, num_samples: int) -> float:
        """Multiply a shape's goodput by this: its ratio, within RANGE. Plain decoding is branching 0."""
        factor = min(max(self.ratio(branching, num_samples), RANGE[0]), RANGE[1])
        if branching:
            return factor
        known = self._of(num_samples).get(0, _Steps()).expected
        return factor * (1.0 + self._doubt * PRIOR_STEPS / (PRIOR_STEPS + known))

    def ratio(self, branching: int, num_samples: int) -> float:
        """Delivered over expected, believed the more the longer it is known."""
        of, untried = self._of(num_samples), 1.0
        if branching:
            drafts = [steps for other, steps in of.items() if other]
            together = _Steps(sum(s.delivered for s in drafts), sum(s.expected for s in drafts))
            untried = together.ratio(1.0) ** COMMON
        return of.get(branching, _Steps()).ratio(untried)

    def observe(
        self, branching: int, num_samples: int, *, delivered: float, expected: float, num_steps: int = 1
    ) -> None:
        """Add a decode step; the record of shapes not in use fades, else they were never tried again.

        Args:
            branching: of the shape.
            num_samples: of the batch.
            delivered: tokens, in those that one step of the shape yields by the models.
            expected: by the models in the seconds that this step took, likewise.
            num_steps: that it stands for.
        """
        of = self._steps.setdefault(num_samples.bit_length(), {})
        mine = of.setdefault(branching, _Steps())
        for steps in of.values():
            steps.fade((DECAY if steps is mine else UNUSED_DECAY) ** num_steps)
        mine.delivered += num_steps * delivered
        mine.expected += num_steps * expected

    def _of(self, num_samples: int) -> dict[int, _Steps]:
        return self._steps.get(num_samples.bit_length(), {})
