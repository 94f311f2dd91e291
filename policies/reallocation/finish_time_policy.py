"""Ours: move a sample where the predicted finish time shrinks by more than the move costs (design 3.3).

The survival curve of this run says how long the open samples are likely to get, the rate curve how fast; from both
follows when each instance will be done (`finish_time`), and from that which moves pay (`move_search`). A sample that
has moved rests, and so does the way back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.records import SampleKey
from .finish_time import Load, Outlook, outlook
from .gate import Gate, WayCosts
from .move_search import FoundMove, Hurdle, MoveSearch
from .pool_records import Move, PoolView
from .rate_curve import RateCurve
from .sample_arrays import FlatPool, flatten, key_of
from .survival import LengthHistory

SAMPLE_COOLDOWN_S = 1.0
"A sample that was moved stays for so long."
PAIR_COOLDOWN_S = 0.5
"After a move nothing goes the opposite way for so long."


class FinishTimePolicy:
    """Predicted finish times, one plan at a time."""

    def __init__(
        self,
        curve: RateCurve,
        gate: Gate,
        *,
        earlier_lengths: Sequence[int] = (),
        hurdle: Hurdle | None = None,
        sample_cooldown_s: float = SAMPLE_COOLDOWN_S,
        pair_cooldown_s: float = PAIR_COOLDOWN_S,
    ) -> None:
        """Make the policy.

        Args:
            curve: what instances deliver; corrected while the run goes.
            gate: predicts and chooses the way of a move.
            earlier_lengths: of the responses of an earlier iteration.
            hurdle: what a move must gain.
            sample_cooldown_s: rest of a moved sample.
            pair_cooldown_s: rest of the way back.
        """
        self._curve = curve
        self._gate = gate
        self._history = LengthHistory(earlier_lengths=earlier_lengths)
        self._hurdle = hurdle or Hurdle()
        self._sample_cooldown_s = sample_cooldown_s
        self._pair_cooldown_s = pair_cooldown_s
        self._moved: dict[SampleKey, float] = {}
        "when each sample was moved last"
        self._ways: dict[tuple[str, str], float] = {}
        "when something was last sent from one instance to another"
        self._ordered: dict[str, list[int]] = {}
        "lengths of the samples last sent to each instance"
        self._began_s = np.inf
        "when the rollout began: the last look at an empty pool, else the first look"

    def note_finished(self, num_response_tokens: int) -> None:
        """The survival curve learns."""
        self._history.note(num_response_tokens)

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        """The gate learns."""
        self._gate.note_transfer(num_bytes=num_bytes, seconds=seconds, cold=cold)

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        """The gate learns."""
        self._gate.note_prefill(num_tokens=num_tokens, seconds=seconds)

    def plan(self, view: PoolView) -> tuple[Move, ...]:
        """Return the moves that pay."""
        pool = flatten(view)
        self._began_s = min(self._began_s, view.now_s)
        self._forget(view.now_s, pool)
        self._observe_rates(pool)
        if not len(pool.instance):
            self._began_s = view.now_s
        if len(pool.names) < 2 or not len(pool.instance) or not pool.num_free.any():
            return ()
        if not self._hurdle.may_pay(pool.num_placed.max(), pool.num_placed.min()):
            return ()
        expected = self._expect(view, pool)
        search = MoveSearch(
            pool,
            expected,
            self._load(pool, expected),
            self._curve,
            cost=lambda samples, sources, targets: self._cost(view, pool, samples, sources, targets),
            may_move=lambda sample, source, target: self._may_move(view, pool, sample, source, target),
            hurdle=self._hurdle,
            elapsed_s=view.now_s - self._began_s,
        )
        return tuple(self._order(view, pool, move) for move in search.run())

    def _expect(self, view: PoolView, pool: FlatPool) -> Outlook:
        prompt_tokens = pool.context_tokens - pool.response_tokens
        return outlook(
            self._history.survival(view.max_new_tokens, pool.response_tokens),
            prompt_tokens=float(prompt_tokens.mean()) if len(prompt_tokens) else 0.0,
        )

    def _load(self, pool: FlatPool, expected: Outlook) -> Load:
        """What every instance has, with what is on its way to it and what the queue will bring."""
        counts = expected.counts(pool.instance, pool.response_tokens, len(pool.names))
        counts[:, 0] += pool.num_from_queue
        for k in np.nonzero(pool.num_arriving)[0]:
            lengths = self._ordered.get(pool.names[k], [])[-int(pool.num_arriving[k]) :]
            # sent by a policy before this one: as long as most are
            unknown = int(pool.num_arriving[k]) - len(lengths)
            mean = int(pool.response_tokens.mean()) if len(pool.instance) else 0
            np.add.at(counts[k], expected.cell(np.array([*lengths, *([mean] * unknown)])), 1.0)
        return expected.load(counts)

    def _cost(
        self, view: PoolView, pool: FlatPool, samples: np.ndarray, sources: np.ndarray, targets: np.ndarray
    ) -> WayCosts:
        """[P, C] of samples [P, C] from sources [P] to targets [P]."""
        names = pool.names
        cold = np.array(
            [(names[s], names[t]) not in view.warm_pairs for s, t in zip(sources, targets, strict=True)]
        )
        return self._gate.costs(pool.context_tokens[samples], cold=cold[:, None])

    def _may_move(self, view: PoolView, pool: FlatPool, sample: int, source: int, target: int) -> bool:
        if not self._moved and not self._ways:
            return True
        back = self._ways.get((pool.names[target], pool.names[source]), -np.inf)
        if view.now_s - back < self._pair_cooldown_s:
            return False
        moved = self._moved.get(key_of(view, pool, sample), -np.inf)
        return view.now_s - moved >= self._sample_cooldown_s

    def _order(self, view: PoolView, pool: FlatPool, found: FoundMove) -> Move:
        source, destination = pool.names[found.source], pool.names[found.destination]
        key = key_of(view, pool, found.sample)
        self._moved[key] = view.now_s
        self._ways[source, destination] = view.now_s
        self._ordered.setdefault(destination, []).append(int(pool.response_tokens[found.sample]))
        return Move(
            key=key,
            source=source,
            destination=destination,
            mode=found.mode,
            gain_s=found.gain_s,
            reason=(
                f"done in {found.later_s:.2f} s there and {found.earlier_s:.2f} s here, "
                f"{found.gain_s:.2f} s sooner with this move"
            ),
        )

    def _forget(self, now_s: float, pool: FlatPool) -> None:
        self._moved = {k: at for k, at in self._moved.items() if now_s - at < self._sample_cooldown_s}
        self._ways = {way: at for way, at in self._ways.items() if now_s - at < self._pair_cooldown_s}
        if self._ordered:
            expected = {pool.names[k]: int(pool.num_arriving[k]) for k in np.flatnonzero(pool.num_arriving)}
            self._ordered = {k: v[-expected[k] :] for k, v in self._ordered.items() if k in expected}

    def _observe_rates(self, pool: FlatPool) -> None:
        """Compare goodput with its prediction where samples run."""
        mean_context = pool.mean_context_tokens
        known = (mean_context > 0) & (pool.goodput_tokens_per_s > 0)
        if known.any():
            samples = pool.goodput_samples[known]
            context = samples * mean_context[known]
            self._curve.observe(samples, pool.goodput_tokens_per_s[known], context)
