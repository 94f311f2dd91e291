"""Dashboard and alerts read only what is declared, and their files are what Prometheus and Grafana take. No Ray."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.observe.monitoring import NAMED, alerts, panel_rows, promql
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.metrics import LIVE

TEMPLATES = [
    *(query for row in panel_rows() for panel in row["panels"] for query in panel["lines"].values()),
    *(alert["expr"] for alert in alerts()),
]
SERIES = re.compile(r"\bray_[a-z0-9_]+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monitoring") / "made"
    assert main(["monitoring", "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    "query", ["{made_up}", "rate({learner/made_up}[rate])", "{emitted_tokens_bucket}", "{moves_sum}"]
)
def test_a_query_cannot_name_what_is_not_declared(query: str) -> None:
    with pytest.raises(RlhfSpecError, match="not declared"):
        promql(query, run="", rate="1m")


def test_queries_name_no_series_of_ours_but_by_the_registry() -> None:
    assert [template for template in TEMPLATES if "rlhfspec" in template] == []


def test_every_live_metric_of_a_run_is_drawn_or_alerted_on() -> None:
    named = {re.sub("_bucket$", "", name) for template in TEMPLATES for name in NAMED.findall(template)}
    sums = {"iterations", "completions"}
    measured_by_the_engine = {"instance_goodput_tokens_per_second", "instance_acceptance_length_tokens"}
    assert LIVE.keys() - named == sums | measured_by_the_engine


def test_the_dashboard_has_each_panel_once_in_a_place_of_its_own(folder: Path) -> None:
    panels = json.loads((folder / "grafana_dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < 24
    for panel in panels:
        for target in panel.get("targets", ()):
            ours = [name for name in SERIES.findall(target["expr"]) if "rlhfspec" in name]
            assert target["expr"].count('{run=~"$run"}') == len(ours), target["expr"]


def test_kubernetes_gets_the_same_rules_and_dashboard(folder: Path) -> None:
    monitor, rule, board = yaml.safe_load_all((folder / "kubernetes.yaml").read_text())
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    assert rule["spec"] == yaml.safe_load((folder / "alert_rules.yaml").read_text())
    assert board["data"]["rlhfspec.json"] == (folder / "grafana_dashboard.json").read_text()


@pytest.mark.skipif(not shutil.which("promtool"), reason="no Prometheus here")
def test_prometheus_takes_the_rules_and_the_queries_of_the_panels(folder: Path, tmp_path: Path) -> None:
    board = json.loads((folder / "grafana_dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m").replace("$run", ".+")}
        for number, query in enumerate(queries)
    ]
    as_rules = tmp_path / "panels.yaml"
    as_rules.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for words in (
        ["rules", str(folder / "alert_rules.yaml"), str(as_rules)],
        ["config", "--syntax-only", str(folder / "prometheus.yaml")],
    ):
        answer = subprocess.run(["promtool", "check", *words], capture_output=True, text=True)
        assert answer.returncode == 0, answer.stdout + answer.stderr
