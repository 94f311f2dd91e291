"""When the next batch is worth beginning under the weights that there are: the law of look-ahead, pure.

An attempted token is worth (probability p that it is proved) x (seconds s that it saves), and costs its row.

With t(b) the seconds until each of b samples has one more token, a batch of B samples pays t(B) / B for a decoded
token and the rows of one proved, v(B): s = t(B) / B - v(B). An attempt beside b running samples makes a decode
step last t(b + 1) instead of t(b), so a of them are worth p s a - (t(b + a) - t(b)) a step. An instance that has
nothing to do costs nobody anything, but where the trainer learns on its processor: there they are worth
p s a - t(a). Beside samples p must be high too: where many part from their drafts the longest of the next batch are
among them, and what the others save ends no step earlier. On a processor busy with rows v(B) is t(B) / B and s
nothing; where a step waits for memory t is flat.
"""

from __future__ import annotations

import numpy as np

from ...profiles.profile import Profile
from ..drafting.cost_view import BatchCosts
from ..reallocation.rate_curve import RateCurve

PRIOR = 0.8
"p before anything was measured: at 1e-6 nearly all, at 1e-5 a third of 100 tokens (ours, SmolLM2 on GSM8K)."
FADE = 0.3
"Of p, that a batch's own share replaces."
RETURN = 0.05
"Of the way to the prior that p goes with a batch of which nothing was attempted: it is tried again some time."
LEAST_SAVED = 0.15
"Of a decoded token's seconds: costs are wrong by some of it, and an attempt's prompt is computed for nothing else."
LEAST_AGREEMENT = 0.5
"Beside samples: below it steps got longer in the simulator, by up to 3%; above it shorter, by up to 28%."
CHAIN = 16
"Draft tokens in a step that proves."
ROWS_A_TOKEN = (CHAIN + 1) / 12.7
"Verified for each proved: a step proves 12.7 of a response of 117 tokens that agrees (ours); the last ones are short."


class LookAheadLaw:
    """How many attempts an instance runs beside its samples."""

    def __init__(
        self, curve: RateCurve, row_s: np.ndarray, *, most: int | None = None, is_shared: bool = False
    ) -> None:
        """A law that has measured nothing.

        Args:
            curve: t(b).
            row_s: [n] seconds of a verified row with 1, 2, .. n samples; beyond as with n.
            most: attempts that an instance runs at most, whatever the law says of them; None: as the law says.
            is_shared: instances have no processor of their own while the trainer learns.
        """
        self._curve, self._row_s, self._most, self._is_shared = curve, row_s, most, is_shared
        self.agreement = PRIOR
        "p: share of the attempted tokens that is proved, of late"
        self._num_compared = self._num_proved = 0
        self._batch = 1
        self._known: dict[tuple[int, int, int, bool], int] = {}

    def num_attempts(self, *, num_running: int, num_free: int, batch: int, is_learning: bool = False) -> int:
        """Attempts that an instance had best run now, `num_free` at most.

        Args:
            num_running: samples that it has, those on their way to it included.
            num_free: slots that they leave.
            batch: slots of an instance that the next batch will use.
            is_learning: no sample of the pool is open, and the trainer learns.
        """
        self._batch = batch
        if self._most is not None or num_free <= 0:
            return max(min(num_free, self._most or 0), 0)
        case = (num_running, num_free, batch, is_learning)
        if case not in self._known:
            self._known[case] = self._best(*case)
        return self._known[case]

    def observe(self, num_tokens: int, num_proved: int) -> None:
        """Of a draft of so many attempted tokens the first so many were the sample's own."""
        self._num_compared += num_tokens
        self._num_proved += num_proved

    def next_batch(self) -> None:
        """Another batch is announced: p takes in what was observed since the last."""
        if self._num_compared:
            self.agreement += FADE * (self._num_proved / self._num_compared - self.agreement)
        else:
            self.agreement += RETURN * (PRIOR - self.agreement)
        self._num_compared = self._num_proved = 0
        self._known.clear()

    @property
    def proving_cost(self) -> float:
        """Seconds of proving an attempted token over those of decoding it, as predicted."""
        decoded_s, proved_s = self._seconds(self._batch)
        return proved_s / max(decoded_s, 1e-12)

    def why(self) -> str:
        """One line: whether it looks ahead at the batch of late, and why."""
        decoded_s, proved_s = self._seconds(self._batch)
        if self._most is not None:
            answer = f"up to {self._most} attempts an instance, as configured"
        elif decoded_s - proved_s >= LEAST_SAVED * decoded_s:
            answer = "attempts where their rows cost less"
        else:
            answer = "no attempts: to prove a token costs what decoding it costs"
        return (
            f"{answer}; {self.agreement:.2f} of attempted tokens proved, "
            f"{1e3 * decoded_s:.3f} ms to decode one, {1e3 * proved_s:.3f} to prove it, {self._batch} samples at once"
        )

    def _seconds(self, batch: int) -> tuple[float, float]:
        """Of a decoded token, and of a proved one."""
        row_s = float(self._row_s[min(batch, len(self._row_s)) - 1])
        return float(self._curve.seconds_per_token(batch)) / batch, ROWS_A_TOKEN * row_s

    def _best(self, num_running: int, num_free: int, batch: int, is_learning: bool) -> int:
        decoded_s, proved_s = self._seconds(batch)
        saved_s = decoded_s - proved_s
        if saved_s < LEAST_SAVED * decoded_s or (num_running and self.agreement < LEAST_AGREEMENT):
            return 0
        counts = np.arange(num_free + 1)
        if num_running:
            cost_s = self._curve.seconds_per_token(num_running + counts)
            cost_s = cost_s - cost_s[0]
        elif self._is_shared and is_learning:
            cost_s = np.where(counts, self._curve.seconds_per_token(counts), 0.0)
        else:
            return num_free
        # of equals the most: what is free costs nobody anything
        worth_s = self.agreement * saved_s * counts - cost_s
        return num_free - int(worth_s[::-1].argmax())


def rows_of_profile(profile: Profile, *, context_tokens: int = 256) -> np.ndarray:
    """[n] seconds of a verified row with 1, 2, .. samples of so many tokens each, by measured costs."""
    rows: list[float] = []
    for batch in range(1, profile.max_samples + 1):
        costs = BatchCosts(profile.cost, num_samples=batch, width=1, max_nodes=CHAIN, max_levels=1)
        uniform_s = costs.at(batch * context_tokens).uniform_s
        rows.append(float(uniform_s[CHAIN] - uniform_s[0]) / (batch * CHAIN))
    return np.array(rows)


def rows_of_curve(curve: RateCurve, max_samples: int) -> np.ndarray:
    """The same where only the curve is known: a verified row costs what a sample more would."""
    batch = np.arange(1, max_samples + 1)
    together_s = curve.seconds_per_token(batch * (CHAIN + 1)) - curve.seconds_per_token(batch)
    return together_s / (batch * CHAIN)
