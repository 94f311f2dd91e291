"""A test policy that moves samples for no reason at all, again and again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlhfspec.policies.reallocation.pool_records import Move, MoveMode, PoolView


class Forced:
    """Moves every sample with some probability, to any other instance, by one of the modes."""

    def __init__(self, *, share: float, modes: Sequence[MoveMode] = tuple(MoveMode), seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.share = share
        self.modes = list(modes)

    def plan(self, view: PoolView) -> tuple[Move, ...]:
        moves = []
        for instance in view.instances:
            others = [other.instance for other in view.instances if other is not instance]
            for key in instance.keys:
                if others and self.random.random() < self.share:
                    moves.append(
                        Move(
                            key=key,
                            source=instance.instance,
                            destination=self.random.choice(others),
                            mode=self.random.choice(self.modes),
                            gain_s=0.0,
                            reason="forced",
                        )
                    )
        self.random.shuffle(moves)
        return tuple(moves)

    def note_finished(self, num_response_tokens: int) -> None:
        pass

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        pass

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        pass
