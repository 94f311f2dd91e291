"""The metrics file: one complete object a line, nothing that is not finite."""

from pathlib import Path

import pytest

from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.metrics import MetricsLog, read_metrics


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_figure_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path: Path, value: float) -> None:
    file = tmp_path / "metrics.jsonl"
    with pytest.raises(RlhfSpecError, match=r"reward/mean of iteration 4"):
        MetricsLog(file).write(4, {"time/update_s": 1.0, "reward/mean": value})
    assert not file.exists()


def test_what_was_written_is_read_back_in_order(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(0, {"reward/mean": 0.25})
    log.write(1, {"reward/mean": 0.5, "time/update_s": 2.0})
    assert read_metrics(log.path) == [
        {"iteration": 0, "reward/mean": 0.25},
        {"iteration": 1, "reward/mean": 0.5, "time/update_s": 2.0},
    ]


@pytest.mark.parametrize(
    "damage",
    [
        b'{"iteration": 1, "rew',
        b"\xff\xfe",
        b"[1, 2]",
        b'{"reward/mean": "high"}',
        b'{"reward/mean": NaN}',
        b'{"reward/mean": 1e999}',
        b'{"reward/mean": ' + b"9" * 400 + b"}",
        b'{"reward/mean": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\0" * 100,
    ],
)
def test_a_cut_or_damaged_line_is_skipped_and_reported(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    MetricsLog(file).write(0, {"reward/mean": 0.25})
    with file.open("ab") as stream:
        stream.write(damage)
    notes: list[str] = []
    assert read_metrics(file, note=notes.append) == [{"iteration": 0, "reward/mean": 0.25}]
    assert notes == [f"{file}:2 is cut or damaged and left out"]
