"""What moving a sample costs: seconds to ship its caches, seconds to compute them anew; learnt while the run goes.

    transfer = latency + bytes / bandwidth (+ opening the channel of a cold pair)
    prefill  = fixed + a * tokens + b * tokens^2

Each is a line in known features with coefficients that are never negative, updated after every observation by
recursive least squares of relative errors; old observations fade, and one far off the line counts less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FADE = 0.98
"Weight of an observation, one observation later."
NOISE = 0.15
"Relative error of one observation."
DOUBT = 3.0
"A start value may be wrong by so many times itself."
OUTLIER = 3.0
"Beyond so many times the noise an observation counts in proportion less."


class LearntLine:
    """seconds = features @ coefficients."""

    def __init__(self, start: Sequence[float], *, doubt: float = DOUBT) -> None:
        """Start from guesses, one a feature, not negative and not all 0."""
        self.coefficients = np.asarray(start, dtype=float)
        # a coefficient guessed as nought may still turn out to matter
        scale = np.maximum(self.coefficients, 0.01 * self.coefficients.max())
        self._most = np.diag((doubt * scale) ** 2)
        self._spread = self._most.copy()

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Seconds of each row, [n] of [n, k], or of one, [k]."""
        return np.asarray(features, dtype=float) @ self.coefficients

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one observation; what is not above 0 or not finite is passed over."""
        if not (np.isfinite(seconds) and seconds > 0):
            return
        row = np.asarray(features, dtype=float)
        predicted = max(float(row @ self.coefficients), 1e-9)
        row, error = row / predicted, seconds / predicted - 1.0
        uncertainty = float(row @ self._spread @ row)
        # far off for what the line is unsure of: an outlier
        allowed = OUTLIER * np.sqrt(NOISE**2 + uncertainty)
        noise = NOISE**2 * max(1.0, abs(error) / allowed) ** 2
        gain = self._spread @ row / (FADE * noise + uncertainty)
        step = np.clip(error, -allowed, allowed)
        self.coefficients = np.maximum(self.coefficients + gain * step, 0.0)
        spread = (self._spread - np.outer(gain, row @ self._spread)) / FADE
        # what is never observed must not become infinitely doubtful
        grown = np.sqrt(np.minimum(np.diag(self._most) / np.maximum(np.diag(spread), 1e-30), 1.0))
        self._spread = spread * np.outer(grown, grown)


class TransferModel:
    """Seconds from a migration's order to the arrival of its caches."""

    def __init__(
        self, *, latency_s: float = 0.02, bytes_per_s: float = 1e9, open_s: float = 0.1, doubt: float = DOUBT
    ) -> None:
        """Start from a measurement, or from guesses for processes on one machine."""
        self._line = LearntLine([latency_s, 1e6 / bytes_per_s, open_s], doubt=doubt)

    def seconds(self, num_bytes: np.ndarray | float, *, cold: np.ndarray | bool = False) -> np.ndarray:
        """Predicted seconds; `cold` where the channel must be opened first."""
        return self._line.predict(self._features(num_bytes, cold))

    def observe(self, num_bytes: int, seconds: float, *, cold: bool) -> None:
        """A transfer took so long."""
        self._line.observe(self._features(num_bytes, cold).tolist(), seconds)

    @staticmethod
    def _features(num_bytes: np.ndarray | float, cold: np.ndarray | bool) -> np.ndarray:
        megabytes, opening = np.broadcast_arrays(np.asarray(num_bytes) / 1e6, np.asarray(cold, dtype=float))
        return np.stack([np.ones_like(megabytes), megabytes, opening], axis=-1)


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
        return self._line.predict(self._features(num_tokens))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A prefill took so long."""
        self._line.observe(self._features(num_tokens).tolist(), seconds)

    @staticmethod
    def _features(num_tokens: np.ndarray | float) -> np.ndarray:
        thousands = np.asarray(num_tokens, dtype=float) / 1e3
        return np.stack([np.ones_like(thousands), thousands, thousands**2], axis=-1)
