"""Each alert fires on what it is for, and none on a run that is well: Prometheus evaluates them on made series."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfspec.cluster.observe.monitoring import alerts, write_monitoring

pytestmark = pytest.mark.skipif(not shutil.which("promtool"), reason="no Prometheus here")

MINUTES = 40
PORT = 'job="ray", instance="node:9090"'
WELL = {
    "up": "1+0x40",
    "run_up": "1+0x40",
    "run_outlived": "1+0x40",
    "progress_timestamp_seconds": "0+60x40",
    "heartbeat_timestamp_seconds": "0+60x40",
    "end_timestamp_seconds": "0+0x40",
    "scheduler_silent_seconds": "1+0x40",
    "policy_weight_version": "3+0x40",
    'instance_weight_version actor="gen-0"': "3+0x40",
    # a dead instance keeps its last version, and serves no more
    'instance_weight_version actor="gen-1"': "1+0x40",
    'instance_serving actor="gen-0"': "1+0x40",
    'instance_serving actor="gen-1"': "0+0x40",
    'instance_drafter_alarm actor="gen-0"': "0+0x40",
    "reward_num_skipped": "0+0x40",
    'lost_actors_total pool="generation"': "1+0x40",
    "node_mem_used": "50+0x40",
    "node_mem_total": "100+0x40",
}
"Values of each minute; an actor was lost once, long ago."

LOOP = {
    "run_up": "1+0x28",
    "run_outlived": "1+0x28",
    "progress_timestamp_seconds": "0+60x28",
    "heartbeat_timestamp_seconds": "0+60x28",
    "end_timestamp_seconds": "0+0x28",
    "scheduler_silent_seconds": "1+0x28",
    "policy_weight_version": "3+0x28",
    'instance_serving actor="gen-0"': "1+0x28",
    'instance_serving actor="gen-1"': "0+0x28",
    "reward_num_skipped": "0+0x28",
}
"What the process of the loop sets, until it dies: a series ends with who sets it."
DEAD = {key: f"{values} stale" for key, values in LOOP.items()}
ENDED = DEAD | {
    "run_up": "1+0x26 0 0 stale",
    "end_timestamp_seconds": "0+0x26 1620 1680 stale",
    'instance_serving actor="gen-0"': "1+0x26 0 0 stale",
}
KILLED_BEFORE = {f'{key} WorkerId="a"': "1+0x9 stale" for key in ("run_up", "run_outlived")} | {
    'heartbeat_timestamp_seconds WorkerId="a"': "0+60x9 stale",
    'end_timestamp_seconds WorkerId="a"': "0+0x9 stale",
}
"Another process of the same run, which was resumed at once."

ILL = (
    ("RlhfspecNoProgress", {"progress_timestamp_seconds": "0+0x40"}),
    ("RlhfspecLoopSilent", {"heartbeat_timestamp_seconds": "0+60x30 1800+0x10"}),
    ("RlhfspecLoopSilent", DEAD),
    ("RlhfspecLoopSilent", KILLED_BEFORE | DEAD),
    # it ended, was resumed, and died then
    (
        "RlhfspecLoopSilent",
        DEAD | KILLED_BEFORE | {'end_timestamp_seconds WorkerId="a"': "0+0x8 540 stale"},
    ),
    # its node is gone as well, and nobody scrapes it any more
    ("RlhfspecLoopSilent", DEAD | {"up": "1+0x28 0+0x12"}),
    # frozen, while the Ray of its own lives
    ("RlhfspecLoopSilent", DEAD | {"run_outlived": "0+0x28 stale"}),
    ("RlhfspecSchedulerSilent", {"scheduler_silent_seconds": "0+60x40"}),
    ("RlhfspecDrafterAlarm", {'instance_drafter_alarm actor="gen-0"': "0x39 1"}),
    ("RlhfspecStaleWeights", {"policy_weight_version": "4+0x40"}),
    ("RlhfspecLostActors", {'lost_actors_total pool="reward"': "_x35 1+0x5"}),
    ("RlhfspecNoInstance", {'instance_serving actor="gen-0"': "0+0x40"}),
    ("RlhfspecRewardFailures", {"reward_num_skipped": "0x39 2"}),
    ("RlhfspecNoSignal", {"learner_no_signal": "0+0x5 1+0x34"}),
    ("RlhfspecMostResponsesCut", {"rollout_length_cut_share": "0.5+0x5 0.75+0x34"}),
    ("RlhfspecIntegrityAlarm", {"integrity_alarms_total": "_x35 1+0x5"}),
    ("RlhfspecWritesDropped", {'dropped_writes_total file="log"': "1x20 1+1x20"}),
    ("RlhfspecNodeMemory", {"node_mem_used": "96+0x40"}),
)
NO_FAULT = (
    {},
    ENDED,
    KILLED_BEFORE,
    KILLED_BEFORE | ENDED,
    # with its own Ray: the port is gone, and perhaps before its last word was read
    DEAD | {"run_outlived": "0+0x28 stale", "up": "1+0x28 0+0x12"},
    DEAD | {"run_outlived": "0+0x28 stale", "up": "1+0x28 stale"},
)


def series(values: dict[str, str]) -> list[dict[str, str]]:
    made = []
    for key, numbers in values.items():
        name, _, label = key.partition(" ")
        if name == "up":
            made.append({"series": f"up{{{PORT}}}", "values": numbers})
        elif name.startswith("node_"):
            made.append({"series": f"ray_{name}{{{PORT}}}", "values": numbers})
        else:
            labels = ", ".join(filter(None, ['run="demo"', label, PORT]))
            made.append({"series": f"ray_rlhfspec_{name}{{{labels}}}", "values": numbers})
    return made


def firing(values: dict[str, str], expected: str | None) -> list[dict[str, Any]]:
    """What promtool expects at the end: of these alerts this one fires and no other; labels are left to it."""
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{expected}"}}', "value": 1}] if expected else []
    return [
        {
            "interval": "1m",
            "input_series": series(values),
            "promql_expr_test": [{"expr": query, "eval_time": f"{MINUTES}m", "exp_samples": samples}],
        }
    ]


def test_each_fires_alone_on_what_it_is_for_and_none_on_a_run_that_is_well(tmp_path: Path) -> None:
    assert {name for name, _ in ILL} == {alert["alert"] for alert in alerts()}
    write_monitoring(tmp_path)
    tests = [test for values in NO_FAULT for test in firing(WELL | values, None)]
    for name, values in ILL:
        tests += firing(WELL | values, name)
    tree = {"rule_files": ["alert_rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tree))
    answer = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "tests.yaml")], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
