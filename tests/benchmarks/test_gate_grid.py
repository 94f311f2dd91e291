"""How the gate is judged: what counts as right, and which moves a cell's seconds come from."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np
import pytest

from rlhfspec.benchmarks.moving.gate_grid import SHORT_REPEATS, SHORT_TURNS, Cell, both_ways, typical
from rlhfspec.policies.reallocation.pool_records import MoveMode

WAYS = ((MoveMode.RECOMPUTE, False), (MoveMode.MIGRATE, False), (MoveMode.MIGRATE, True))


def cell(chosen: MoveMode, *, migrate_s: float, recompute_s: float) -> Cell:
    return Cell(
        context_tokens=16,
        bandwidth=1e9,
        cold=False,
        migrate_s=migrate_s,
        recompute_s=recompute_s,
        chosen=str(chosen),
    )


@pytest.mark.parametrize(
    ("migrate_s", "recompute_s", "right"),
    [
        (1.0, 2.0, {MoveMode.MIGRATE}),
        (2.0, 1.0, {MoveMode.RECOMPUTE}),
        (1.0, 1.04, {MoveMode.MIGRATE, MoveMode.RECOMPUTE}),
        (1.06, 1.0, {MoveMode.RECOMPUTE}),
    ],
)
def test_the_cheaper_way_is_right_and_one_within_a_twentieth(
    migrate_s: float, recompute_s: float, right: set[MoveMode]
) -> None:
    cells = {mode: cell(mode, migrate_s=migrate_s, recompute_s=recompute_s) for mode in MoveMode}
    assert {mode for mode, one in cells.items() if one.is_right} == right
    cheaper = MoveMode.MIGRATE if migrate_s < recompute_s else MoveMode.RECOMPUTE
    assert {one.best for one in cells.values()} == {str(cheaper)}


class Recorder:
    """Moves nothing; the n-th move took n seconds."""

    def __init__(self) -> None:
        self.moves: list[tuple[MoveMode, bool]] = []

    def __call__(self, context: int, mode: MoveMode, *, cold: bool) -> float:
        self.moves.append((mode, cold))
        return float(len(self.moves))


def test_short_contexts_are_moved_by_turns_so_that_drift_falls_on_all_ways() -> None:
    recorder = Recorder()
    seconds = both_ways(recorder, 16, 2)
    assert [way for way, _ in groupby(recorder.moves)] == list(WAYS) * SHORT_TURNS
    assert {way: len(of_way) for way, of_way in seconds.items()} == dict.fromkeys(
        WAYS, 2 * SHORT_REPEATS * SHORT_TURNS
    )
    # every move counts once, for the way that it went
    assert sorted(value for of_way in seconds.values() for value in of_way) == list(
        range(1, len(recorder.moves) + 1)
    )
    assert all(recorder.moves[int(value) - 1] == way for way, of_way in seconds.items() for value in of_way)


@pytest.mark.parametrize(("context", "shipped"), [(512, 2), (2048, 1)])
def test_longer_contexts_are_moved_in_one_go_and_the_longest_shipped_once(context: int, shipped: int) -> None:
    recorder = Recorder()
    both_ways(recorder, context, 2)
    assert [way for way, _ in groupby(recorder.moves)] == list(WAYS)
    assert Counter(recorder.moves) == dict(zip(WAYS, (3, shipped, shipped), strict=True))


def test_what_is_typical_does_not_hear_stragglers() -> None:
    usual = np.linspace(30.0, 40.0, 40)
    assert typical(usual) == pytest.approx(35.0)
    assert typical([*usual, 500.0, 900.0]) == pytest.approx(35.0, abs=0.6)
    assert typical([3.0]) == 3.0 and typical([3.0, 5.0]) == 4.0
