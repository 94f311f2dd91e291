"""Packing: nothing is lost, nothing is larger than allowed, the order of arrival does not matter."""

import numpy as np
from pytest import mark

from rlhfspec.learning.training.batching import pack_by_length, pack_tokens, pad_right


@mark.parametrize("max_tokens", [1, 10, 64])
def test_packs_hold_every_index_once_within_the_limit(max_tokens):
    lengths = np.random.default_rng(0).integers(1, 30, size=50).tolist()
    packs = pack_by_length(lengths, max_tokens)
    assert sorted(i for pack in packs for i in pack) == list(range(50))
    for pack in packs:
        assert len(pack) == 1 or len(pack) * max(lengths[i] for i in pack) <= max_tokens


@mark.parametrize("max_tokens", [1, 30, 100])
def test_packs_without_padding_hold_every_index_once_within_the_limit_and_are_few(max_tokens):
    lengths = np.random.default_rng(0).integers(1, 30, size=50).tolist()
    packs = pack_tokens(lengths, max_tokens)
    assert sorted(i for pack in packs for i in pack) == list(range(50))
    sizes = [sum(lengths[i] for i in pack) for pack in packs]
    assert all(size <= max_tokens or len(pack) == 1 for size, pack in zip(sizes, packs, strict=True))
    if max_tokens >= max(lengths):
        assert len(packs) <= 11 / 9 * -(-sum(lengths) // max_tokens) + 1


def test_the_longest_are_packed_first_and_gaps_are_filled():
    assert pack_tokens([4, 9, 6, 1, 12], 10) == [[4], [1, 3], [2, 0]]


def test_short_ones_go_together():
    assert pack_by_length([9, 1, 8, 2], 18) == [[1, 3], [2, 0]]


def test_padding_goes_to_the_right():
    ids, mask = pad_right([np.array([5]), np.array([6, 7])], pad_token_id=0)
    assert ids.tolist() == [[5, 0], [6, 7]]
    assert mask.tolist() == [[True, False], [True, True]]
