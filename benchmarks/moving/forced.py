"""A test policy: seeded random moves in every direction at once, however little sense they make."""

from __future__ import annotations

import numpy as np

from ...policies.reallocation.pool_records import Move, MoveMode, PoolView
from ...policies.reallocation.sample_arrays import flatten, key_of


class ForcedMoves:
    """At every plan each sample is moved with a given probability, to any other instance with a free slot.

    Equal sequences of views give equal moves: the draw of a plan depends on the seed and on its number only.
    """

    def __init__(self, *, rate: float, seed: int, recompute_share: float = 0.0) -> None:
        """Make the policy.

        Args:
            rate: probability that a sample is moved, a plan.
            seed: of the draws.
            recompute_share: share of the moves that recompute.
        """
        self._rate = rate
        self._seed = seed
        self._recompute_share = recompute_share
        self._num_plans = 0

    def plan(self, view: PoolView) -> tuple[Move, ...]:
        """Draw moves."""
        random = np.random.default_rng([self._seed, self._num_plans])
        self._num_plans += 1
        pool = flatten(view)
        free = pool.num_free.copy()
        chosen = np.nonzero(random.random(len(pool.instance)) < self._rate)[0]
        moves = []
        for sample in random.permutation(chosen):
            source = int(pool.instance[sample])
            targets = np.nonzero((free > 0) & (np.arange(len(free)) != source))[0]
            if not len(targets):
                continue
            destination = int(random.choice(targets))
            free[destination] -= 1
            recompute = random.random() < self._recompute_share
            moves.append(
                Move(
                    key=key_of(view, pool, int(sample)),
                    source=pool.names[source],
                    destination=pool.names[destination],
                    mode=MoveMode.RECOMPUTE if recompute else MoveMode.MIGRATE,
                    gain_s=0.0,
                    reason="forced",
                )
            )
        return tuple(moves)

    def note_finished(self, num_response_tokens: int) -> None:
        """Nothing to learn."""

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        """Nothing to learn."""

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        """Nothing to learn."""
