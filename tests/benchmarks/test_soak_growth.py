"""What grew is named; what only warmed up, came and went, or shrank is not."""

from __future__ import annotations

import pytest

from rlhfspec.benchmarks.soak import JUDGED_FROM_MINUTES, grown, growth

FLAT = {
    "minutes": 60.0,
    "all_mib_late_over_early": 1.04,
    "trainer_mib_late_over_early": 0.5,
    "open_files_late_over_early": 1.01,
    "num_processes_late_over_early": 1.0,
    "object_store_mib_late_over_early": 1.0,
    "processes_left": 0.0,
    "shared_memory_left_mib": 0.5,
    "object_store_size_mib": 1024.0,
    "object_store_peak_mib": 70.0,
    "spilled_peak_mib": 0.0,
    "folder_kib_per_iteration": 900.0,
}


def test_growth_compares_the_last_sixth_with_the_second() -> None:
    samples = [{"all_mib": size} for size in (500.0, 100.0, 999.0, 999.0, 999.0, 103.0)]
    assert growth(samples) == {"all_mib_late_over_early": pytest.approx(1.03)}


def test_something_from_nothing_is_growth() -> None:
    samples = [{"object_store_mib": size} for size in (0.0, 0.0, 0.0, 0.0, 0.0, 3.0)]
    assert growth(samples) == {"object_store_mib_late_over_early": 4.0}


def test_a_flat_run_has_nothing_to_name() -> None:
    assert grown(FLAT) == []


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [
        ("all_mib_late_over_early", 1.06, "all_mib grew to 1.060"),
        ("trainer_mib_late_over_early", 1.2, "trainer_mib grew to 1.200"),
        ("open_files_late_over_early", 1.03, "open_files grew to 1.030"),
        ("num_processes_late_over_early", 1.02, "num_processes grew to 1.020"),
        ("object_store_mib_late_over_early", 1.5, "object_store_mib grew"),
        ("processes_left", 2.0, "2 processes were left"),
        ("shared_memory_left_mib", 64.0, "64 MiB of shared memory"),
        ("spilled_peak_mib", 8.0, "8 MiB of objects were written to disk"),
        ("object_store_peak_mib", 1100.0, "took 1100 MiB"),
    ],
)
def test_what_grew_or_was_left_is_named(figure: str, value: float, said: str) -> None:
    (line,) = grown(FLAT | {figure: value})
    assert said in line and "expected at most" in line


def test_a_short_run_is_judged_by_what_it_leaves_alone() -> None:
    short = FLAT | {"minutes": JUDGED_FROM_MINUTES / 3.0, "all_mib_late_over_early": 2.0}
    assert grown(short) == [] and len(grown(short | {"processes_left": 1.0})) == 1
