"""What an instance delivers with B running samples: goodput(B), and B / goodput(B), seconds per token of each of them.

Between known points seconds per token are a line in B, as the cost of a forward is. Both curves are made monotone:
more samples never deliver less together, and never faster each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cost_view import BatchCosts
from policies.recalibration import AcceptanceRecalibration
from policies.shapes import ShapeTable
from policies.track_record import TrackRecord
from profiles.profile import Profile

FACTOR_STEP = 0.05
FACTOR_RANGE = (0.2, 5.0)


class RateCurve:
    """Goodput over the number of running samples, corrected by one slow factor for what this run delivers."""

    def __init__(self, num_samples: Sequence[float], goodput_tokens_per_s: Sequence[float]) -> None:
        """Make the curve from points, in any order; equal numbers of samples count as their mean.

        Raises ValueError when there is no point, or one that is not above 0.
        """
        samples, rates = np.asarray(num_samples, dtype=float), np.asarray(goodput_tokens_per_s, dtype=float)
        good = len(samples) == len(rates) > 0 and (samples > 0).all() and (rates > 0).all()
        if not good:
            raise ValueError(f"expected points above 0 of as many samples as rates, got {samples}, {rates}")
        self._samples, group = np.unique(samples, return_inverse=True)
        means = np.bincount(group, weights=rates) / np.bincount(group)
        together = np.maximum.accumulate(means)
        self._seconds = np.maximum.accumulate(self._samples / together)
        # the line goes on behind the last point; one point is taken for saturation
        self._slope = float(self._seconds[-1] / self._samples[-1])
        if len(self._samples) > 1:
            self._slope = float(np.diff(self._seconds[-2:])[0] / np.diff(self._samples[-2:])[0])
        self.factor = 1.0
        "delivered over predicted, of late"

    def seconds_per_token(self, num_samples: np.ndarray | float) -> np.ndarray:
        """Seconds until each of B samples has one more token; for B below 1 as for 1, beyond the points a line."""
        wanted = np.maximum(np.asarray(num_samples, dtype=float), 1.0)
        known, seconds = self._samples, self._seconds
        inside = np.interp(wanted, known, seconds)
        beyond = np.maximum(wanted - known[-1], 0.0)
        return (inside + self._slope * beyond) / self.factor

    def goodput(self, num_samples: np.ndarray | float) -> np.ndarray:
        """Tokens per second of the whole instance with B samples."""
        return np.maximum(np.asarray(num_samples, dtype=float), 1.0) / self.seconds_per_token(num_samples)

    def copy(self) -> RateCurve:
        """The same curve with a factor of its own."""
        made = RateCurve(self._samples.tolist(), (self._samples / self._seconds).tolist())
        made.factor = self.factor
        return made

    def knee(self, max_samples: int) -> int:
        """Number of samples up to `max_samples` at which goodput saturates.

        It is where the curve stands highest above the line between its ends ("Kneedle", Satopaa et al. 2011);
        `max_samples` where the curve is a line.
        """
        if max_samples <= 2:
            return max_samples
        samples = np.arange(1, max_samples + 1)
        rates = self.goodput(samples)
        line = rates[0] + (rates[-1] - rates[0]) * (samples - 1) / (max_samples - 1)
        above = (rates - line) / rates[-1]
        return int(samples[above.argmax()]) if above.max() > 1e-3 else max_samples

    def observe(self, num_samples: np.ndarray, goodput_tokens_per_s: np.ndarray) -> None:
        """Compare what instances deliver with their prediction; the median counts, and moves the factor slowly."""
        ratio = float(np.median(np.asarray(goodput_tokens_per_s) / self.goodput(num_samples)))
        step = FACTOR_STEP * float(np.clip(np.log(max(ratio, 1e-9)), -0.5, 0.5))
        self.factor = float(np.clip(self.factor * np.exp(step), *FACTOR_RANGE))


def rate_curve_from_profile(
    profile: Profile,
    *,
    context_tokens: int = 256,
    max_nodes: int = 16,
    max_depth: int = 16,
    speculation: bool = True,
) -> RateCurve:
    """The curve that the goodput policy expects with this profile; plain decoding without speculation.

    Args:
        profile: of the pair on this machine.
        context_tokens: of each sample.
        max_nodes: most draft nodes verified per sample.
        max_depth: most levels drafted.
        speculation: false where nothing is drafted.
    """
    shapes = ShapeTable(profile.yields, max_depth)
    path = AcceptanceRecalibration(np.diff(profile.yields[0].curve)[:max_depth]).path
    record = TrackRecord(doubt=0.0)
    points: list[int] = []
    rates: list[float] = []
    for batch in _batches(profile.max_samples):
        views = {
            width: BatchCosts(
                profile.cost, num_samples=batch, width=width, max_nodes=max_nodes, max_levels=max_depth
            ).at(batch * context_tokens)
            for width in (shapes.widths if speculation else [1])
        }
        plain = batch / float(views[1].uniform_s[0] + views[1].draft_s[0])
        points.append(batch)
        rates.append(max(plain, shapes.best(views, path, record).goodput) if speculation else plain)
    return RateCurve(points, rates)


def _batches(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, .. up to `most`."""
    sizes = {1, most}
    power = 1
    while power <= most:
        sizes |= {power, min(power * 3 // 2, most)}
        power *= 2
    return sorted(sizes)
