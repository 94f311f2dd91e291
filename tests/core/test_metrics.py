"""The table of metrics: one meaning and one name each; the metrics file: one complete object a line, all finite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.metrics import (
    LIVE,
    METRICS,
    MetricsLog,
    bounded_label,
    exported,
    exported_name,
    find_metric,
    read_metrics,
)

EXPORTED = [*LIVE.values(), *(found for name in METRICS if (found := exported(name)))]


def test_every_metric_is_declared_once_and_says_what_it_is():
    for metric in METRICS.values():
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


def test_no_two_metrics_share_a_name() -> None:
    names = [metric.series for metric in EXPORTED]
    assert len(names) > 120
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_name_is_one_that_prometheus_takes_and_seconds_are_spelled_out() -> None:
    for metric in EXPORTED:
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", metric.series.replace("*", "x")), metric.series
        assert metric.help and metric.unit
        # the scraper's own; ours would become exported_instance
        assert not {"instance", "job"} & set(metric.labels), metric.name
        assert not re.search(r"_s(_|$)", metric.name.replace("per_s", "")), metric.name
        if metric.unit == "s" and "*" not in metric.name:
            assert "_seconds" in metric.name, metric.name
        if metric.unit == "bytes":
            assert "bytes" in metric.name, metric.name


@pytest.mark.parametrize(
    ("figure", "name"),
    [
        ("time/update_s", "time_update_seconds"),
        ("rollout/goodput_tokens_per_s", "rollout_goodput_tokens_per_second"),
        ("moves/downtime_s_max", "moves_downtime_seconds_max"),
        ("reward/format-ok", "reward_format_ok"),
        ("learner/num_skipped_samples", "learner_num_skipped_samples"),
    ],
)
def test_a_figure_is_called(figure: str, name: str) -> None:
    assert exported_name(figure) == name
    found = exported(figure)
    assert found is not None and found.kind == "gauge" and found.series == f"ray_rlhfspec_{name}"


@pytest.mark.parametrize(
    ("label", "value", "told"),
    [
        ("actor", "gen-3", "gen-3"),
        ("actor", "gen-0-r63", "gen-0-r63"),
        ("actor", "gen-64-r130", "gen-0-r2"),
        ("actor", "loop", "loop"),
        ("waited_for", "gen-0, gen-12-r4, trainer", "gen, trainer"),
        ("waited_for", "scheduler-r3", "scheduler"),
        ("waited_for", "the object store", "the object store"),
        ("phase", "generate-1", "generate-1"),
    ],
)
def test_a_label_has_boundedly_many_values_however_many_actors_come_and_go(
    label: str, value: str, told: str
) -> None:
    assert bounded_label(label, value) == told


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
