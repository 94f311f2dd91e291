"""The table of metrics: each has one meaning, and what is not in it cannot be set."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.metric_registry import declared, find_metric
from rlhfspec.core.metrics import MetricsLog


def test_every_metric_is_declared_once_and_says_what_it_is():
    names = [metric.name for metric in declared()]
    assert len(set(names)) == len(names)
    for metric in declared():
        area, _, rest = metric.name.partition("/")
        assert area and rest and "/" not in rest and metric.unit and metric.help[-1] != ".", metric


def test_a_metric_that_is_not_declared_cannot_be_set(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(RlhfSpecError, match="learner/typo is not declared"):
        log.write(0, {"reward/mean": 1.0, "learner/typo": 2.0})
    assert not log.path.exists()


@pytest.mark.parametrize("part", ["steps", "format.v2", "длина", "a b"])
def test_the_parts_of_any_reward_belong_to_one_family(part):
    found = find_metric(f"reward/{part}")
    assert found is not None and found.name == "reward/*"


def test_a_name_of_its_own_goes_before_a_family():
    found = find_metric("eval/accuracy")
    assert found is not None and found.name == "eval/accuracy"
    assert find_metric("eval/pass_at_16") is not None and find_metric("eval/pass") is None
