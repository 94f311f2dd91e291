"""Running sums: they are those of GenerationStats, and what was read of them stays as it was."""

import pytest

from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.engine.counters import Tally


def test_sums_add_up_and_a_reading_stays() -> None:
    tally = Tally()
    assert tally.stats == GenerationStats()
    tally.add(num_decode_steps=1, draft_s=0.5)
    before = tally.stats
    tally.add(num_decode_steps=2, draft_s=0.25, num_preemptions=1)
    assert before == GenerationStats(num_decode_steps=1, draft_s=0.5)
    assert tally.stats == GenerationStats(num_decode_steps=3, draft_s=0.75, num_preemptions=1)
    assert tally["num_decode_steps"] == 3


def test_a_sum_that_nobody_reads_is_refused() -> None:
    with pytest.raises(KeyError, match="num_steps"):
        Tally().add(num_steps=1)
