"""The buffer of features: bounded in bytes, drawn by need, the previous iteration's longest kept longest."""

from collections import Counter

import numpy as np
import pytest
import torch

from rlhfspec.core.errors import ConfigError
from rlhfspec.engine.drafters.head.feature_recorder import FeatureSequence
from rlhfspec.learning.drafts.features import FeatureBuffer

HIDDEN = 4


def made(response: int, prompt: int = 3) -> FeatureSequence:
    total = prompt + response
    return FeatureSequence(
        token_ids=np.zeros(total, dtype=np.int64),
        prompt_length=prompt,
        taps=torch.zeros(total - 1, 3 * HIDDEN),
        last=torch.zeros(response, HIDDEN),
    )


def lengths(buffer: FeatureBuffer) -> list[int]:
    """Of everything that the buffer holds."""
    everything = buffer.sample(np.random.default_rng(0), 1 << 30)
    return [sequence.num_response_tokens for sequence in everything]


def test_bytes_never_exceed_the_bound():
    rng = np.random.default_rng(0)
    buffer = FeatureBuffer(20_000)
    for _ in range(200):
        buffer.add(made(int(rng.integers(1, 60))))
        assert 0 < buffer.num_bytes <= 20_000
        assert buffer.num_bytes == sum(made(length).num_bytes for length in lengths(buffer))
    assert len(buffer) > 1


def test_what_is_too_large_or_teaches_nothing_is_not_kept():
    buffer = FeatureBuffer(2_000)
    assert buffer.add(made(5))
    assert not buffer.add(made(100))
    assert not buffer.add(made(1, prompt=1))
    assert lengths(buffer) == [5]


def test_room_is_made_by_the_previous_iterations_shortest():
    sizes = [30, 10, 20]
    buffer = FeatureBuffer(sum(made(size).num_bytes for size in sizes))
    for size in sizes:
        buffer.add(made(size))
    buffer.next_iteration()
    assert sorted(lengths(buffer)) == [10, 20, 30]
    buffer.add(made(9))
    assert sorted(lengths(buffer)) == [9, 20, 30]
    buffer.add(made(8))
    assert sorted(lengths(buffer)) == [8, 9, 30]


def test_only_one_iteration_back_is_kept():
    buffer = FeatureBuffer(1 << 20)
    buffer.add(made(5))
    buffer.next_iteration()
    buffer.add(made(6))
    buffer.next_iteration()
    assert lengths(buffer) == [6]
    buffer.next_iteration()
    assert len(buffer) == 0 and buffer.num_bytes == 0


def test_what_the_head_fails_on_is_drawn_more_often():
    buffer = FeatureBuffer(1 << 20)
    sequences = [made(20) for _ in range(10)]
    for sequence in sequences:
        buffer.add(sequence)
    buffer.learned(sequences, [0.9 if index < 5 else 0.1 for index in range(10)])
    rng = np.random.default_rng(0)
    drawn: Counter[int] = Counter()
    for _ in range(300):
        (one,) = buffer.sample(rng, 20)
        drawn[id(one)] += 1
    needed = sum(drawn[id(sequence)] for sequence in sequences[:5])
    assert 0.85 * 300 < needed < 0.95 * 300
    assert all(drawn[id(sequence)] for sequence in sequences), "nothing is forgotten for good"


def test_a_sample_keeps_to_its_tokens_and_is_never_empty():
    buffer = FeatureBuffer(1 << 20)
    assert buffer.sample(np.random.default_rng(0), 100) == []
    for _ in range(10):
        buffer.add(made(30))
    for seed in range(5):
        sample = buffer.sample(np.random.default_rng(seed), 100)
        assert len(sample) == 3 and len({id(one) for one in sample}) == 3
    assert len(buffer.sample(np.random.default_rng(0), 10)) == 1


def test_what_was_visited_most_makes_room_first():
    old, new = made(20), made(20)
    buffer = FeatureBuffer(2 * old.num_bytes)
    buffer.add(old)
    buffer.sample(np.random.default_rng(0), 20)
    buffer.add(new)
    third = made(20)
    buffer.add(third)
    left = buffer.sample(np.random.default_rng(0), 1000)
    assert {id(one) for one in left} == {id(new), id(third)}


def test_no_sequence_is_drawn_once_it_was_learned_from_often_enough():
    buffer = FeatureBuffer(1 << 20, max_passes=2)
    old, new = made(20), made(10)
    buffer.add(old)
    for _ in range(3):
        # drawn, and the step was stopped
        buffer.sample(np.random.default_rng(0), 100)
    for _ in range(2):
        buffer.learned(buffer.sample(np.random.default_rng(0), 100), [0.9])
    assert buffer.sample(np.random.default_rng(0), 100) == []
    buffer.add(new)
    assert [id(one) for one in buffer.sample(np.random.default_rng(0), 100)] == [id(new)]


def test_what_is_dropped_makes_room():
    buffer = FeatureBuffer(1 << 20)
    good, bad = made(20), made(10)
    buffer.add(good)
    buffer.add(bad)
    buffer.drop([bad])
    assert lengths(buffer) == [20] and buffer.num_bytes == good.num_bytes


def test_no_bytes_are_refused():
    with pytest.raises(ConfigError, match="max_bytes above 0, got 0"):
        FeatureBuffer(0)
