"""What shapes of drafts deliver over what was expected of them: settles what the models get wrong about a whole shape.

A tree's hidden costs, a chain's early stops. Most of what the models get wrong at a batch size they get wrong for every
shape of draft, so that a shape not tried there is believed to share three quarters of it: else whatever has not been
tried looked best wherever drafts deliver less than expected. Plain decoding stands for itself.
"""

from __future__ import annotations

RANGE = (0.85, 1.15)
"Acceptance and costs have corrections of their own: this one is for the rest."
PRIOR_TOKENS = 50.0
"Of a sample, at what is believed of an untried shape: of ten decode steps or so."
DECAY = 0.99
UNUSED_DECAY = 0.995
"Of the record of a shape, while another is used on batches of this size."
COMMON = 0.75
"Of the logarithm of what drafts deliver over what was expected."


class TrackRecord:
    """Tokens per sample over those expected, by batch size (in powers of two) and branching; decayed sums."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, tuple[float, float]]] = {}

    def factor(self, branching: int, num_samples: int) -> float:
        """Multiply a shape's goodput by this: its ratio, within RANGE. Plain decoding is branching 0."""
        return min(max(self.ratio(branching, num_samples), RANGE[0]), RANGE[1])

    def ratio(self, branching: int, num_samples: int) -> float:
        """Delivered over expected, believed the more the longer it is known."""
        sums = self._sums.get(num_samples.bit_length(), {})
        untried = 1.0
        if branching:
            drafts = [tokens for other, tokens in sums.items() if other]
            untried = _ratio(sum(d for d, _ in drafts), sum(e for _, e in drafts), 1.0) ** COMMON
        return _ratio(*sums.get(branching, (0.0, 0.0)), untried)

    def observe(self, branching: int, num_samples: int, *, delivered: float, expected: float) -> None:
        """Add one decode step's tokens; the record of shapes not in use fades, else they were never tried again."""
        sums = self._sums.setdefault(num_samples.bit_length(), {})
        for other, (tokens, wanted) in sums.items():
            if other != branching:
                sums[other] = (tokens * UNUSED_DECAY, wanted * UNUSED_DECAY)
        tokens, wanted = sums.get(branching, (0.0, 0.0))
        sums[branching] = (
            tokens * DECAY + delivered / num_samples,
            wanted * DECAY + expected / num_samples,
        )


def _ratio(delivered: float, expected: float, untried: float) -> float:
    return (delivered + PRIOR_TOKENS * untried) / (expected + PRIOR_TOKENS)
