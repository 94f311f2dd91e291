"""Predicted finish times: exact where lengths are certain, an expected maximum where they are not."""

import numpy as np
import pytest

from rlhfspec.policies.reallocation.finish_time import outlook
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.reallocation.survival import LengthHistory, Survival

LINE = RateCurve(np.arange(1, 65), np.full(64, 100.0))
"All samples together get 100 tokens a second: B samples need B / 100 s a token."
FLAT = RateCurve([1, 64], [100.0, 6400.0])
"Every sample gets 100 tokens a second."


def certain(length: int, limit: int = 32) -> Survival:
    made = LengthHistory(prior_samples=0.0)
    made.note(length)
    return made.survival(limit)


def seconds(
    survival: Survival,
    curve: RateCurve,
    *instances: tuple[int, ...],
    cells: int = 64,
    prompt_tokens: float = 0.0,
) -> list[float]:
    expected = outlook(survival, cells=cells, prompt_tokens=prompt_tokens)
    numbers = np.repeat(np.arange(len(instances)), [len(i) for i in instances])
    tokens = np.array([length for lengths in instances for length in lengths], dtype=np.int64)
    counts = expected.counts(numbers, tokens, len(instances))
    return expected.load(counts).course(curve).finish_seconds().tolist()


def test_certain_lengths_give_the_time_computed_by_hand() -> None:
    # all end at 10: three tokens with both, three more of the one that has 4; then one alone; then none
    made = seconds(certain(10), LINE, (4, 7), (9,), ())
    assert made == pytest.approx([3 * 0.02 + 3 * 0.01, 0.01, 0.0], abs=1e-6)


def test_with_a_flat_curve_the_longest_decides() -> None:
    assert seconds(certain(20), FLAT, (1, 5, 19), (5,)) == pytest.approx([0.19, 0.15], abs=1e-6)


def test_wide_cells_are_off_by_no_more_than_their_width() -> None:
    made = seconds(certain(200, limit=256), FLAT, (0,), (100, 150), cells=64)
    assert made == pytest.approx([2.0, 1.0], abs=0.04)


def test_the_expected_maximum_of_two_coins_by_hand() -> None:
    # length 1 or 2 with equal chance: two samples get 1 token each, then a further one with chance 3/4;
    # given that any is left, 4/3 are on average
    curve = Survival(probability=np.array([1.0, 0.5, 0.0]))
    assert seconds(curve, FLAT, (0, 0)) == pytest.approx([0.01 * 1.75], abs=1e-6)
    assert seconds(curve, LINE, (0, 0)) == pytest.approx([0.02 + 0.75 * 4 / 3 * 0.01], abs=1e-6)


def test_the_expected_maximum_agrees_with_drawn_lengths() -> None:
    random = np.random.default_rng(1)
    limit = 64
    curve = Survival(probability=np.append(0.95 ** np.arange(limit), 0.0))
    drawn = np.minimum(random.geometric(0.05, (20000, 8)), limit)
    drawn.sort(axis=1)
    # token after token: how many are left
    steps = np.diff(drawn, axis=1, prepend=0)
    truth = (steps * LINE.seconds_per_token(np.arange(8, 0, -1))).sum(axis=1).mean()
    assert seconds(curve, LINE, (0,) * 8) == pytest.approx([truth], rel=0.02)


def test_contexts_slow_the_instance_that_holds_them() -> None:
    # 10 ms a token and 10 us for each token of context; cells of one token, contexts at the middle of each
    curve = RateCurve([1, 64], [100.0, 6400.0], context_tokens=[0, 0], context_token_s=[1e-5, 1e-5])
    made = seconds(certain(10), curve, (4, 7), (9,), prompt_tokens=100)
    both = sum(0.010 + 1e-5 * (211 + 2 * (token + 0.5)) for token in range(3))
    one = sum(0.010 + 1e-5 * (100 + 4 + token + 0.5) for token in range(3, 6))
    assert made == pytest.approx([both + one, 0.010 + 1e-5 * 109.5], rel=1e-5)


def test_every_sample_more_takes_no_less_time() -> None:
    curve = LengthHistory().survival(64)
    times = [seconds(curve, LINE, (5,) * count)[0] for count in range(12)]
    assert times[0] == 0.0
    assert (np.diff(times) > 0).all()
