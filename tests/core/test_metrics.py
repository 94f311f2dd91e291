"""The metrics file: one complete object a line, nothing that is not finite."""

from pathlib import Path

import pytest

from core.errors import RlhfSpecError
from core.metrics import MetricsLog, read_metrics


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
