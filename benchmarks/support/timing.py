"""Side-by-side timing: rates taken in turn, compared round by round.

Every round runs all contestants forwards and backwards (A B C C B A), so that a drift of the machine falls on all
alike; a round's rate is the mean of its two runs, and a figure the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Rate = Callable[[], float]
"Do the work once; tokens (or forwards) per second."


def interleaved(rates: Mapping[str, Rate], rounds: int) -> dict[str, list[float]]:
    """Run every contestant 2 * rounds times, after one run each that is thrown away; rates of each round."""
    for rate in rates.values():
        rate()
    order = list(rates)
    taken: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        round_rates: dict[str, list[float]] = {name: [] for name in order}
        for name in [*order, *reversed(order)]:
            round_rates[name].append(rates[name]())
        for name, values in round_rates.items():
            taken[name].append(statistics.fmean(values))
    return taken


def ratios(taken: Mapping[str, Sequence[float]], a: str, b: str) -> list[float]:
    """Return a / b of every round."""
    return [x / y for x, y in zip(taken[a], taken[b], strict=True)]


class Figures:
    """Figures of a benchmark with their intervals."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.intervals: dict[str, tuple[float, float]] = {}

    def keep(self, name: str, samples: Sequence[float]) -> float:
        """Store the median of the samples, and a bootstrap 95% interval of it; returns the median."""
        values = np.asarray(samples)
        draws = np.random.default_rng(0).choice(values, size=(2000, len(values)))
        medians = np.median(draws, axis=1)
        self.values[name] = statistics.median(samples)
        self.intervals[name] = (float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975)))
        return self.values[name]
