"""Generation beside training, step by step on paper; the bound."""

from __future__ import annotations

import itertools
import random

import pytest

from policies.simulate.performance.stale_pipeline import bound, stale_pipeline


def test_in_turns() -> None:
    times = stale_pipeline([3.0, 5.0, 4.0], [2.0, 2.0, 2.0], staleness=0)
    assert times.generation_start_s == (0.0, 5.0, 12.0)
    assert times.training_end_s == (5.0, 12.0, 18.0)
    assert times.step_s(0) == pytest.approx(6.5)
    assert [times.staleness(batch) for batch in range(3)] == [0, 0, 0]


def test_one_step_behind_overlaps() -> None:
    times = stale_pipeline([3.0, 5.0, 4.0, 1.0], [2.0, 6.0, 2.0, 2.0], staleness=1)
    # batch 1 begins with the first weights; batch 2 needs update 0 (at 5), batch 3 update 1 (at 14)
    assert times.generation_start_s == (0.0, 3.0, 8.0, 14.0)
    assert times.generation_end_s == (3.0, 8.0, 12.0, 15.0)
    assert times.training_start_s == (3.0, 8.0, 14.0, 16.0)
    assert times.training_end_s == (5.0, 14.0, 16.0, 18.0)
    assert [times.staleness(batch) for batch in range(4)] == [0, 1, 1, 1]


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_even_batches_take_the_longer_of_both(staleness: int) -> None:
    for generating, training in ((3.0, 7.0), (7.0, 3.0)):
        times = stale_pipeline([generating] * 40, [training] * 40, staleness=staleness)
        assert times.step_s(20) == pytest.approx(7.0)


def test_no_batch_is_staler_than_allowed_and_more_staleness_is_never_slower() -> None:
    draw = random.Random(7)
    for _ in range(300):
        count = draw.randint(2, 12)
        generating = [draw.uniform(0.1, 9.0) for _ in range(count)]
        training = [draw.uniform(0.1, 9.0) for _ in range(count)]
        ends = []
        for staleness in range(4):
            times = stale_pipeline(generating, training, staleness=staleness)
            assert max(times.staleness(batch) for batch in range(count)) <= staleness
            ends.append(times.training_end_s[-1])
        assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(ends))


def test_the_bound() -> None:
    assert bound(0.5, 2.0) == pytest.approx(4 / 3)
    assert bound(1.0, 3.0) == pytest.approx(3.0)
    assert bound(0.0, 3.0) == pytest.approx(1.0)
    # NeMo-RL's RL-Zero: 100.0 of 151.2 s, 1.77 times as fast
    assert bound(100.0 / 151.2, 1.77) == pytest.approx(1.40, abs=0.01)
