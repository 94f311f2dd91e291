"""The files that Prometheus, Grafana and Kubernetes read, from the panels and alerts of this package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhfspec.cluster.monitoring.alerts import rule_groups
from rlhfspec.cluster.monitoring.dashboard import dashboard
from rlhfspec.core.files import storage_errors, write_whole

LOCAL_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"
"Where a head writes the addresses of its nodes' metrics ports; `_temp_dir` of `ray start` takes the place of /tmp/ray."
LABELS = {"app.kubernetes.io/part-of": "rlhfspec"}
_BY = "# Written by: rlhfspec monitoring --out DIR\n"


def monitoring_files() -> Mapping[str, str]:
    """Name to text of every file."""
    board = json.dumps(dashboard(), indent=1) + "\n"
    rules = {"groups": rule_groups()}
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
