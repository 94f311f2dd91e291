"""What moving a sample costs: seconds to ship its caches, seconds to compute them anew; learnt while the run goes.

    transfer = latency + bytes / bandwidth (+ opening the channel of a cold pair)
    prefill  = fixed + a * tokens + b * tokens^2

Each is a line in known features with coefficients that are never negative, fitted after every observation to the last
ones by least squares of relative errors. Start values count as weak observations, so that the first few real ones
decide even where a guess was wrong a hundredfold; old ones fade, and one far off the line counts less (Huber 1964).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

FADE = 0.97
"Weight of an observation, one observation later."
MEMORY = 128
"Observations kept."
NOISE = 0.15
"Relative error of one observation."
DOUBT = 30.0
"A start value may be wrong by so many times itself."
OUTLIER = 3.0
"Beyond so many times the noise an observation counts in proportion less."
_ROBUST_FITS = 3


class LearntLine:
    """seconds = features @ coefficients."""

    def __init__(self, start: Sequence[float], *, doubt: float = DOUBT) -> None:
        """Start from guesses, one a feature, not negative and not all 0."""
        self.coefficients = np.asarray(start, dtype=float)
        self._start = self.coefficients.copy()
        # a coefficient guessed as nought may still turn out to matter
        self._scale = doubt * np.maximum(self._start, 0.01 * self._start.max())
        self._rows: deque[np.ndarray] = deque(maxlen=MEMORY)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one observation; what is not above 0 or not finite is passed over."""
        if not (np.isfinite(seconds) and seconds > 0):
            return
        self._rows.append(np.asarray(features, dtype=float) / seconds)
        rows = np.stack(self._rows)
        faded = FADE ** np.arange(len(rows) - 1, -1, -1)
        weights = faded
        for _ in range(_ROBUST_FITS):
            self.coefficients = self._fit(rows, weights)
            off = np.abs(rows @ self.coefficients - 1.0)
            weights = faded * np.minimum(1.0, OUTLIER * NOISE / np.maximum(off, 1e-9))

    def _fit(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Weighted least squares of relative errors; a coefficient that comes out negative is 0, the others again."""
        normal = (rows * weights[:, None]).T @ rows / NOISE**2 + np.diag(self._scale**-2)
        right = (rows * weights[:, None]).sum(0) / NOISE**2 + self._start * self._scale**-2
        used = np.ones(len(right), dtype=bool)
        while True:
            fitted = np.zeros(len(right))
            fitted[used] = np.linalg.solve(normal[np.ix_(used, used)], right[used])
            if (fitted >= 0).all():
                return fitted
            used &= fitted > 0


class TransferModel:
    """Seconds from a migration's order to the arrival of its caches."""

    def __init__(
        self, *, latency_s: float = 0.02, bytes_per_s: float = 1e9, open_s: float = 0.1, doubt: float = DOUBT
    ) -> None:
        """Start from a measurement, or from guesses for processes on one machine."""
        self._line = LearntLine([latency_s, 1e6 / bytes_per_s, open_s], doubt=doubt)

    def seconds(self, num_bytes: np.ndarray | float, *, cold: np.ndarray | bool = False) -> np.ndarray:
        """Predicted seconds; `cold` where the channel must be opened first."""
        latency_s, megabyte_s, open_s = self._line.coefficients
        return latency_s + megabyte_s * (np.asarray(num_bytes) / 1e6) + open_s * np.asarray(cold, dtype=float)

    def observe(self, num_bytes: int, seconds: float, *, cold: bool) -> None:
        """A transfer took so long."""
        self._line.observe([1.0, num_bytes / 1e6, float(cold)], seconds)


class PrefillModel:
    """Seconds in which an instance computes the caches of a sample's tokens."""

    def __init__(
        self,
        *,
        fixed_s: float = 5e-3,
        token_s: float = 2e-4,
        token_squared_s: float = 1e-8,
        doubt: float = DOUBT,
    ) -> None:
        """Start from a measurement, or from guesses for a model of about 10M parameters on one core."""
        self._line = LearntLine([fixed_s, 1e3 * token_s, 1e6 * token_squared_s], doubt=doubt)

    def seconds(self, num_tokens: np.ndarray | float) -> np.ndarray:
        """Predicted seconds."""
        fixed_s, thousand_s, squared_s = self._line.coefficients
        thousands = np.asarray(num_tokens, dtype=float) / 1e3
        return fixed_s + (thousand_s + squared_s * thousands) * thousands

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A prefill took so long."""
        thousands = num_tokens / 1e3
        self._line.observe([1.0, thousands, thousands**2], seconds)
