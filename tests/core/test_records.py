"""Records: frozen, sums add up, ratios are derived."""

import dataclasses

import pytest

from rlhfspec.core.decode_records import PLAIN, GenerationStats


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.num_nodes = 3  # type: ignore[misc]


def test_stats_add_and_subtract_field_by_field() -> None:
    a = GenerationStats(num_decode_steps=2, num_emitted_tokens=6, num_sample_steps=2, draft_s=0.5)
    b = GenerationStats(num_decode_steps=1, num_emitted_tokens=4, num_sample_steps=2, verify_s=1.0)
    total = a + b
    assert (total.num_decode_steps, total.num_emitted_tokens) == (3, 10)
    assert total.busy_s == 1.5
    assert total - b == a


def test_ratios_follow_their_definitions() -> None:
    stats = GenerationStats(
        num_sample_steps=4, num_draft_tokens=32, num_accepted_tokens=8, num_emitted_tokens=12
    )
    assert stats.acceptance_rate == 0.25
    assert stats.mean_acceptance_length == 3.0
    assert GenerationStats().acceptance_rate == 0.0
