"""Names at the metrics port follow Prometheus' conventions, and no two metrics share one."""

from __future__ import annotations

import re

import pytest

from rlhfspec.core.exported_metrics import (
    bounded_label,
    exported_figure,
    figure_metrics,
    figure_name,
    live_metrics,
)


def test_no_two_metrics_share_a_name() -> None:
    names = [metric.series for metric in (*live_metrics(), *figure_metrics())]
    assert len(names) > 120
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_name_is_one_that_prometheus_takes_and_seconds_are_spelled_out() -> None:
    for metric in (*live_metrics(), *figure_metrics()):
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
    assert figure_name(figure) == name
    exported = exported_figure(figure)
    assert exported is not None and exported.kind == "gauge" and exported.series == f"ray_rlhfspec_{name}"


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
