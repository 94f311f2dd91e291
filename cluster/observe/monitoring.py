"""What Prometheus and Grafana need: panels (`panels.yaml`), alerts (`alerts.yaml`), and the files that they read.

Queries name metrics by the table in core/metrics.toml, so that none can name what nobody sets: `{NAME}` stands for a
series, NAME being a live metric, one of an iteration such as `reward/mean`, or one of Ray's; `[rate]` for a window.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import RlhfSpecError
from ...core.files import storage_errors, write_whole
from ...core.metrics import LIVE, RAY_SERIES, exported

LOCAL_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"
"Where a head writes the addresses of its nodes' metrics ports; `_temp_dir` of `ray start` takes the place of /tmp/ray."
LABELS = {"app.kubernetes.io/part-of": "rlhfspec"}
RUN = '{run=~"$run"}'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
"Grafana's grid is 24 wide."
NAMED = re.compile(r"\{([a-z_0-9/]+)\}")
_BY = "# Written by: rlhfspec monitoring --out DIR\n"


def panel_rows() -> list[dict[str, Any]]:
    """The rows of the dashboard, their panels' `lines` from legend to query."""
    rows = _data("panels.yaml")
    for panel in (one for row in rows for one in row["panels"]):
        if "iteration" in panel:
            panel["help"] = "Of the last iteration."
            panel["lines"] = {
                f"{legend} {{{{run}}}}": f"max by (run) ({{{name}}})"
                for legend, name in panel["iteration"].items()
            }
    return rows


def alerts() -> list[dict[str, Any]]:
    """The alerts as Prometheus' rules, but for the names in their queries."""
    return _data("alerts.yaml")


def _data(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def promql(template: str, *, run: str, rate: str) -> str:
    """The query with every name in its place. Raises RlhfSpecError for one that is not declared.

    Args:
        template: as this module says.
        run: the matcher in braces of every series of ours, such as `{run=~"$run"}`; may be empty.
        rate: window, such as `1m`.
    """
    query = NAMED.sub(lambda match: _series(match[1]) + ("" if match[1] in RAY_SERIES else run), template)
    return query.replace("[rate]", f"[{rate}]")


def _series(name: str) -> str:
    if name in RAY_SERIES:
        return name
    part = ""
    found = exported(name) if "/" in name else LIVE.get(name)
    if found is None:  # a part of a histogram
        base, _, part = name.rpartition("_")
        found, part = LIVE.get(base), f"_{part}"
    if found is None or (found.kind == "histogram") != (part in ("_bucket", "_sum", "_count")):
        raise RlhfSpecError(
            f"a query names {name}, which is not declared; expected a name of core/metrics.toml"
        )
    return found.series + part


def monitoring_files() -> Mapping[str, str]:
    """Name to text of every file."""
    board = json.dumps(dashboard(), indent=1) + "\n"
    rules = {"groups": [{"name": "rlhfspec", "rules": alerts()}]}
    for alert in rules["groups"][0]["rules"]:
        alert["expr"] = promql(alert["expr"], run="", rate="1m")
    return {
        "grafana_dashboard.json": board,
        "alert_rules.yaml": _BY + _yaml(rules),
        "prometheus.yaml": _BY + _yaml(_prometheus()),
        "kubernetes.yaml": _BY + "---\n".join(_yaml(one) for one in _kubernetes(board, rules)),
    }


def write_monitoring(folder: Path) -> list[Path]:
    """Write the files into `folder`. Raises StorageError."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in monitoring_files().items():
        write_whole(folder / name, text)
        paths.append(folder / name)
    return paths


def dashboard() -> dict[str, Any]:
    """The dashboard; panels have numbers, by which `d-solo` embeds a single one."""
    return {
        "uid": "rlhfspec",
        "title": "RLHFSpec",
        "tags": ["ray", "rlhf"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_DATA_SOURCE, _runs()]},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for row in panel_rows():
        place = {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row["row"], "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        for index, panel in enumerate(row["panels"]):
            line, column = divmod(index, _COLUMNS)
            place = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(panel) | {"id": number, "gridPos": place}
            number += 1
        top += -(-len(row["panels"]) // _COLUMNS) * _HEIGHT


def _panel(panel: Mapping[str, Any]) -> dict[str, Any]:
    form = panel.get("form", "lines")
    defaults: dict[str, Any] = {"unit": panel.get("unit", "short"), "min": None}
    tree: dict[str, Any] = {
        "title": panel["title"],
        "description": panel.get("help", ""),
        "datasource": _SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": promql(query, run=RUN, rate="$__rate_interval"),
                "legendFormat": legend,
                "datasource": _SOURCE,
            }
            for number, (legend, query) in enumerate(panel["lines"].items())
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
    if form == "number":
        return tree | {"type": "stat", "options": {"reduceOptions": {"calcs": ["lastNotNull"]}}}
    defaults["custom"] = {
        "fillOpacity": 30 if form == "stacked" else 0,
        "stacking": {"mode": "normal" if form == "stacked" else "none", "group": "A"},
    }
    legend = {"displayMode": "list", "placement": "bottom"}
    return tree | {"type": "timeseries", "options": {"legend": legend}}


_DATA_SOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus", "refresh": 1, "hide": 0}


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values({promql('{run_up}', run='', rate='')}, run)",
        "refresh": 2,
        "sort": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _prometheus() -> dict[str, Any]:
    """For a Prometheus beside a Ray head of the same machine."""
    return {
        "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},
        "rule_files": ["alert_rules.yaml"],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [LOCAL_TARGETS]}]}],
    }


def _kubernetes(board: str, rules: dict[str, Any]) -> list[dict[str, Any]]:
    """For the Prometheus operator, and for a Grafana whose sidecar collects dashboards by label."""

    def named(api: str, kind: str, labels: Mapping[str, str] = LABELS) -> dict[str, Any]:
        return {"apiVersion": api, "kind": kind, "metadata": {"name": "rlhfspec", "labels": dict(labels)}}

    monitor = {
        "selector": {"matchLabels": LABELS},
        "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
    }
    config_map = named("v1", "ConfigMap", LABELS | {"grafana_dashboard": "1"})
    config_map["metadata"]["name"] = "rlhfspec-dashboard"
    return [
        named("monitoring.coreos.com/v1", "PodMonitor") | {"spec": monitor},
        named("monitoring.coreos.com/v1", "PrometheusRule") | {"spec": rules},
        config_map | {"data": {"rlhfspec.json": board}},
    ]


class _Dumper(yaml.SafeDumper):
    """Text of several lines stays readable."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out."""
        return True


def _str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _str)


def _yaml(tree: dict[str, Any]) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)
