"""Grafana's dashboard as JSON: rows of panels, a choice of data source and of runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhfspec.cluster.monitoring.panels import ROWS, Panel
from rlhfspec.cluster.monitoring.queries import promql

UID = "rlhfspec"
TITLE = "RLHFSpec"
RUN = '{run=~"$run"}'
RATE = "$__rate_interval"
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
"Grafana's grid is 24 wide."


def dashboard() -> dict[str, Any]:
    """The dashboard; panels have numbers, by which `d-solo` embeds a single one."""
    return {
        "uid": UID,
        "title": TITLE,
        "tags": ["ray", "rlhf"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _runs()]},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for row in ROWS:
        place = {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, _COLUMNS)
            place = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(panel) | {"id": number, "gridPos": place}
            number += 1
        top += -(-len(row.panels) // _COLUMNS) * _HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": None}
    tree: dict[str, Any] = {
        "title": panel.title,
        "description": panel.help,
        "datasource": _source(),
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": promql(target.query, run=RUN, rate=RATE),
                "legendFormat": target.legend,
                "datasource": _source(),
            }
            for number, target in enumerate(panel.targets)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
    if panel.form == "number":
        return tree | {"type": "stat", "options": {"reduceOptions": {"calcs": ["lastNotNull"]}}}
    is_stacked = panel.form == "stacked"
    defaults["custom"] = {
        "fillOpacity": 30 if is_stacked else 0,
        "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
    }
    return tree | {
        "type": "timeseries",
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "refresh": 1, "hide": 0}


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _source(),
        "query": f"label_values({promql('{run_up}', run='', rate='')}, run)",
        "refresh": 2,
        "sort": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }
