"""What an instance delivers with B running samples: goodput(B), and B / goodput(B), seconds per token of each of them.

Between known points seconds per token are a line in B, as the cost of a forward is. Both curves are made monotone:
more samples never deliver less together, and never faster each.

Attention reads every context in every forward, so seconds per token also grow with the contexts of all samples
together: base(B) + slope(B) * context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from ...profiles.profile import Profile
from ..drafting.cost_view import BatchCosts
from ..drafting.recalibration import AcceptanceRecalibration, TrackRecord
from ..drafting.shape_search import ShapeTable

FAR_SAMPLES = 1e6
"Behind the last point, to which its line goes on."
FACTOR_STEP = 0.05
FACTOR_RANGE = (0.2, 5.0)
MOST_CONTEXT_SHARE = 0.9
"Of the seconds at a point: no more is taken to be reading contexts."


class RateCurve:
    """Goodput over the number of running samples, corrected by one slow factor for what this run delivers."""

    def __init__(
        self,
        num_samples: Sequence[float],
        goodput_tokens_per_s: Sequence[float],
        *,
        context_tokens: Sequence[float] | None = None,
        context_token_s: Sequence[float] | None = None,
    ) -> None:
        """Make the curve from points, in any order; equal numbers of samples count as their mean.

        Args:
            num_samples: [n] that run.
            goodput_tokens_per_s: [n] of all of them together.
            context_tokens: [n] of all of them together at that goodput; must be given with the next.
            context_token_s: [n] what a token of context adds to seconds per token; nothing where it is not given.

        Raises ValueError when there is no point, or one that is not above 0, or a context or its cost below 0.
        """
        samples, rates = np.asarray(num_samples, dtype=float), np.asarray(goodput_tokens_per_s, dtype=float)
        context, slope = (
            np.zeros(len(samples)) if given is None else np.asarray(given, dtype=float)
            for given in (context_tokens, context_token_s)
        )
        good = len(samples) == len(rates) == len(context) == len(slope) > 0
        good = (
            good and (samples > 0).all() and (rates > 0).all() and (context >= 0).all() and (slope >= 0).all()
        )
        if not good:
            raise ValueError(
                f"expected as many points above 0 of samples as of rates, contexts and their costs, "
                f"got {samples}, {rates}, {context}, {slope}"
            )
        self._samples, group = np.unique(samples, return_inverse=True)
        means, self._context, self._slope = (
            np.bincount(group, weights=values) / np.bincount(group) for values in (rates, context, slope)
        )
        together = np.maximum.accumulate(means)
        self._seconds = np.maximum.accumulate(self._samples / together)
        # contexts never explain more than nearly all of what was measured
        most = MOST_CONTEXT_SHARE * self._seconds / np.maximum(self._context, 1e-9)
        self._slope = np.minimum(self._slope, most)
        self._base = np.maximum.accumulate(self._seconds - self._slope * self._context)
        self._seconds, self._base = self._with_far_end(self._seconds), self._with_far_end(self._base)
        self._slope = np.append(self._slope, self._slope[-1])
        self._samples = np.append(self._samples, self._samples[-1] + FAR_SAMPLES)
        self.factor = 1.0
        "delivered over predicted, of late"

    def seconds_per_token(
        self, num_samples: np.ndarray | float, context_tokens: np.ndarray | float | None = None
    ) -> np.ndarray:
        """Seconds until each of B samples has one more token; for B below 1 as for 1, beyond the points a line.

        `context_tokens`: of all of them together; None: what they were when the points were measured.
        """
        wanted = np.maximum(np.asarray(num_samples, dtype=float), 1.0)
        if context_tokens is None:
            return np.interp(wanted, self._samples, self._seconds) / self.factor
        # one search for both
        both = np.interp(wanted, self._samples, (self._base + 1j * self._slope) / self.factor)
        return both.real + both.imag * context_tokens

    def context_token_s(self, num_samples: np.ndarray | float) -> np.ndarray:
        """What each token of context adds to the seconds per token of B samples."""
        return np.interp(np.asarray(num_samples, dtype=float), self._samples, self._slope) / self.factor

    def goodput(
        self, num_samples: np.ndarray | float, context_tokens: np.ndarray | float | None = None
    ) -> np.ndarray:
        """Tokens per second of the whole instance with B samples; `context_tokens` as above."""
        samples = np.maximum(np.asarray(num_samples, dtype=float), 1.0)
        return samples / self.seconds_per_token(samples, context_tokens)

    def copy(self) -> RateCurve:
        """The same curve with a factor of its own."""
        return copy(self)

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

    def observe(
        self,
        num_samples: np.ndarray,
        goodput_tokens_per_s: np.ndarray,
        context_tokens: np.ndarray | None = None,
    ) -> None:
        """Compare what instances deliver with their prediction; the median counts, and moves the factor slowly."""
        expected = self.goodput(num_samples, context_tokens)
        ratio = float(np.median(np.asarray(goodput_tokens_per_s) / expected))
        step = FACTOR_STEP * float(np.clip(np.log(max(ratio, 1e-9)), -0.5, 0.5))
        self.factor = float(np.clip(self.factor * np.exp(step), *FACTOR_RANGE))

    def _with_far_end(self, seconds: np.ndarray) -> np.ndarray:
        """A line goes on behind the last point; one point is taken for saturation."""
        growth = np.diff(seconds, prepend=0.0)[-1] / np.diff(self._samples, prepend=0.0)[-1]
        return np.append(seconds, seconds[-1] + FAR_SAMPLES * growth)


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
        context_tokens: of each sample where the curve is told of none; the slope is from there to twice that.
        max_nodes: most draft nodes verified per sample.
        max_depth: most levels drafted.
        speculation: false where nothing is drafted.
    """
    shapes = ShapeTable(profile.yields, max_depth)
    path = AcceptanceRecalibration(np.diff(profile.yields[0].curve)[:max_depth]).path
    record = TrackRecord(doubt=0.0)
    batches = _batches(profile.max_samples)
    rates: list[float] = []
    slopes: list[float] = []
    for batch in batches:
        costs = {
            width: BatchCosts(
                profile.cost, num_samples=batch, width=width, max_nodes=max_nodes, max_levels=max_depth
            )
            for width in (shapes.widths if speculation else [1])
        }

        def rate(context: int, batch: int = batch, costs: dict[int, BatchCosts] = costs) -> float:
            views = {width: cost.at(batch * context) for width, cost in costs.items()}
            plain = batch / float(views[1].uniform_s[0] + views[1].draft_s[0])
            return max(plain, shapes.best(views, path, record).goodput) if speculation else plain

        near, far = rate(context_tokens), rate(2 * context_tokens)
        rates.append(near)
        slopes.append(max(batch / far - batch / near, 0.0) / (batch * context_tokens))
    return RateCurve(
        batches,
        rates,
        context_tokens=[batch * context_tokens for batch in batches],
        context_token_s=slopes,
    )


def _batches(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, .. up to `most`."""
    sizes = {1, most}
    power = 1
    while power <= most:
        sizes |= {power, min(power * 3 // 2, most)}
        power *= 2
    return sorted(sizes)
