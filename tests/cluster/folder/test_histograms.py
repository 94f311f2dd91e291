"""Histograms lose no value, and their bins fit together."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec.cluster.folder.iteration_logs import MOST_BINS, Histogram, read_histograms, write_histograms

NUMBERS = st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=50)


@given(NUMBERS)
def test_every_value_is_in_one_bin_and_bins_are_few(values):
    made = Histogram.of(values)
    assert sum(made.counts) == len(values) and len(made.counts) <= MOST_BINS
    assert made.first <= min(values) and max(values) <= made.first + len(made.counts) * made.width


@given(NUMBERS, NUMBERS)
def test_edges_of_the_narrower_of_two_fall_on_those_of_the_wider(one, other):
    narrow, wide = sorted((Histogram.of(one), Histogram.of(other)), key=lambda made: made.width)
    assert math.log2(wide.width / narrow.width).is_integer()
    assert (wide.first / narrow.width).is_integer()


def test_counts_are_of_the_bins_they_say():
    made = Histogram.of([0.0, 0.1, 1.0, 1.0, 31.9])
    assert (made.first, made.width) == (0.0, 1.0)
    assert made.counts[:2] == (2, 2) and made.counts[31] == 1 and len(made.counts) == 32


def test_one_value_has_one_bin():
    assert Histogram.of([0.3] * 5).counts == (5,)


def test_what_was_written_is_read_back_and_damage_is_left_out(tmp_path: Path):
    file = tmp_path / "histograms.jsonl"
    write_histograms(file, 3, {"reward": [0.0, 1.0], "empty": []})
    with file.open("ab") as stream:
        stream.write(b'[1]\n{"iteration": 4, "reward": {"first": "x"}}\n{"iteration": 5, "rew')
    rows = read_histograms(file)
    assert [iteration for iteration, _ in rows] == [3, 4]
    assert rows[0][1] == {"reward": Histogram.of([0.0, 1.0])} and rows[1][1] == {}
    assert read_histograms(tmp_path / "none.jsonl") == []


def test_no_value_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Histogram.of(np.zeros(0))  # type: ignore[arg-type]
