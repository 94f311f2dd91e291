"""The alerts of a run, as Prometheus' rules. Each says what it means and what to do first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhfspec.cluster.monitoring.queries import promql


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule."""

    name: str
    query: str
    "as in `cluster.monitoring.queries`"
    holds: str
    "how long before it is told"
    severity: Literal["warning", "critical"]
    text: str
    advice: str


_UP = "and on (run) max by (run) ({run_up}) == 1"
_HEARD = "max by (run) (max_over_time({heartbeat_timestamp_seconds}[1h]))"
"The series of a dead loop end with it: an hour of what it said last is looked at."
_NOT_ENDED = f"unless on (run) max by (run) (max_over_time({{end_timestamp_seconds}}[1h])) >= {_HEARD}"
"By times: a run that is resumed has other series, of which the old ones say that it was up."
_CAN_TELL = (
    "and on (run) (max by (run) (last_over_time({run_outlived}[1h])) == 1 or max by (run) "
    "(last_over_time({run_up}[1h]) and on (job, instance) up == 1))"
)
"Not of a run whose own Ray, and with it the port, has ended: well or not, nobody there can say."


def _grew(name: str, by: str, window: str) -> str:
    """More than a window ago; a counter that has just appeared counts from 0, which `increase` does not."""
    now = f"sum by (run, {by}) ({{{name}}})"
    return f"{now} - (sum by (run, {by}) ({{{name}}} offset {window}) or 0 * {now}) > 0"


ALERTS = (
    Alert(
        name="RlhfspecNoProgress",
        query="(time() - max by (run) ({progress_timestamp_seconds}) > 1200) " + _UP,
        holds="1m",
        severity="critical",
        text="run {{ $labels.run }} has not moved on for {{ $value | humanizeDuration }}",
        advice="rlhfspec diagnose says who waits for whom; a single update that takes longer is no fault",
    ),
    Alert(
        name="RlhfspecLoopSilent",
        query=f"((time() - {_HEARD} > 120) {_NOT_ENDED}) {_CAN_TELL}",
        holds="1m",
        severity="critical",
        text="the loop of run {{ $labels.run }} gives no sign of life for {{ $value | humanizeDuration }}",
        advice="look whether its process lives; if it does not, resume from the last checkpoint",
    ),
    Alert(
        name="RlhfspecSchedulerSilent",
        query="max by (run) ({scheduler_silent_seconds}) > 120",
        holds="1m",
        severity="critical",
        text="the scheduler of run {{ $labels.run }} has not answered for {{ $value | humanizeDuration }}",
        advice="it is replaced by itself when it is dead; rlhfspec diagnose shows its stack when it hangs",
    ),
    Alert(
        name="RlhfspecDrafterAlarm",
        query="max by (run, actor) ({instance_drafter_alarm}) == 1",
        holds="0m",
        severity="warning",
        text="{{ $labels.actor }} of run {{ $labels.run }} suspended drafting: too little was accepted",
        advice="the run goes on without drafts; look at the drafter's checkpoint, or let it be refitted",
    ),
    Alert(
        name="RlhfspecStaleWeights",
        query=(
            "max by (run) ({policy_weight_version}) - on (run) min by (run) ({instance_weight_version} and on "
            "(run, actor) {instance_serving} > 0) > 0"
        ),
        holds="10m",
        severity="warning",
        text="an instance of run {{ $labels.run }} is {{ $value }} versions of the weights behind",
        advice="rlhfspec status shows which; it is given up when it answers no more",
    ),
    Alert(
        name="RlhfspecLostActors",
        query=_grew("lost_actors", "pool", "15m"),
        holds="0m",
        severity="warning",
        text="run {{ $labels.run }} lost {{ $value }} actors of {{ $labels.pool }} in 15 minutes",
        advice="they are replaced up to cluster.max_instance_restarts; look at memory and at the nodes",
    ),
    Alert(
        name="RlhfspecNoInstance",
        query="(sum by (run) ({instance_serving}) == 0) " + _UP,
        holds="5m",
        severity="critical",
        text="no instance of run {{ $labels.run }} serves",
        advice="look at rlhfspec status and whether the cluster has room for replacements",
    ),
    Alert(
        name="RlhfspecRewardFailures",
        query="max by (run) ({reward/num_skipped}) > 0",
        holds="0m",
        severity="warning",
        text="{{ $value }} samples of the last iteration of run {{ $labels.run }} have no reward",
        advice="look at the run's events for what the reward function raised",
    ),
    Alert(
        name="RlhfspecNoSignal",
        query="max by (run) ({learner/no_signal}) == 1",
        holds="30m",
        severity="warning",
        text="the rewards of run {{ $labels.run }} have taught nothing for 30 minutes",
        advice="the run's events name the cause: equal rewards, cut responses, a gradient of 0",
    ),
    Alert(
        name="RlhfspecMostResponsesCut",
        query="max by (run) ({rollout/length_cut_share}) > 0.5",
        holds="30m",
        severity="warning",
        text="{{ $value | humanizePercentage }} of the responses of run {{ $labels.run }} are cut",
        advice="raise sampling.max_new_tokens, or see in samples/ whether responses end as a turn ends",
    ),
    Alert(
        name="RlhfspecIntegrityAlarm",
        query=_grew("integrity_alarms", "run", "1h").replace("run, run", "run"),
        holds="0m",
        severity="critical",
        text="an instance of run {{ $labels.run }} reported a sample that another one owns; it was dropped",
        advice="no sample is lost or counted twice; keep the logs of the scheduler and file an issue",
    ),
    Alert(
        name="RlhfspecWritesDropped",
        query=_grew("dropped_writes", "file", "15m"),
        holds="0m",
        severity="warning",
        text="run {{ $labels.run }} could not write {{ $value }} lines or pages ({{ $labels.file }})",
        advice="the disk of the run folder is full, or gone",
    ),
    Alert(
        name="RlhfspecNodeMemory",
        query="{ray_node_mem_used} / {ray_node_mem_total} > 0.95",
        holds="5m",
        severity="warning",
        text="a Ray node ({{ $labels.instance }}) uses {{ $value | humanizePercentage }} of its memory",
        advice="Ray ends processes soon; make batches smaller or pods larger (rlhfspec check has the plan)",
    ),
)


def rule_groups() -> list[dict[str, Any]]:
    """As `groups` of Prometheus' rule file."""
    rules = [
        {
            "alert": alert.name,
            "expr": promql(alert.query, run="", rate="1m"),
            "for": alert.holds,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.text, "description": alert.advice},
        }
        for alert in ALERTS
    ]
    return [{"name": "rlhfspec", "rules": rules}]
