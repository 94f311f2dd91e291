"""What faults came to: two run folders of one config beside each other, figures, and what is wrong in a line each."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ...core.checkpoint_manifest import verify_checkpoint
from ...core.metrics import read_metrics
from .injection import Fault

GROUPS_ZERO = (
    "groups_differing_samples",
    "groups_missing_samples",
    "groups_alarms",
    "groups_faults_left",
    "groups_moves_left",
)
"Figures of moves between groups that are 0 where all is well."
ALL_CARDS = 40
"Faults of a run to which each kind and pool is dealt at least once."
_KEY = ("run_seed", "stream", "sample_index")
_EQUAL = ("response_token_ids", "policy_logprobs", "sampling_logprobs", "reward", "finish_reason")
_OF_THE_CLOCK = (
    "time/",
    "moves/",
    "pool/",
    "rollout/goodput",
    # what a lost instance, or a fuller one, makes again
    "rollout/num_recomputed",
    "rollout/num_preemptions",
    # how far a refit gets in its seconds, and what is accepted then
    "draft/",
    "rollout/acceptance_rate",
    "rollout/mean_acceptance_length",
)
"Metrics that two equal runs need not share."


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a disturbed run has more, less or otherwise than the undisturbed one."""

    num_samples: int
    num_lost: int
    num_duplicated: int
    num_different: int
    "samples of which a token, a log-probability or the reward differs"
    weights_equal: bool
    metrics_different: Sequence[str]
    "names of those that differ in any iteration, beside those of the clock"

    @property
    def is_equal(self) -> bool:
        """Whether nobody could tell which was which."""
        wrong = self.num_lost or self.num_duplicated or self.num_different or self.metrics_different
        return self.weights_equal and not wrong


def compare_runs(undisturbed: Path, disturbed: Path) -> Comparison:
    """Compare all rollouts, the metrics, and the checksum of the last weights."""
    one, other = _samples(undisturbed), _samples(disturbed)
    counts = Counter(key for key, _ in other)
    expected, got = dict(one), dict(other)
    return Comparison(
        num_samples=len(one),
        num_lost=len(expected.keys() - got.keys()),
        num_duplicated=sum(count - 1 for count in counts.values()) + len(got.keys() - expected.keys()),
        num_different=sum(key in got and got[key] != value for key, value in expected.items()),
        weights_equal=final_checksum(undisturbed) == final_checksum(disturbed),
        metrics_different=_metrics_different(undisturbed, disturbed),
    )


def final_checksum(run: Path) -> str:
    """Of the target that the run ended with; its files are compared with their manifest."""
    return str(verify_checkpoint(run / "checkpoints" / "target")["parameter_checksum"])


def _samples(run: Path) -> list[tuple[Any, Mapping[str, Any]]]:
    return [
        ((file.name, *(row[name] for name in _KEY)), {name: row[name] for name in _EQUAL})
        for file in sorted((run / "rollouts").glob("iteration_*.parquet"))
        for row in pq.read_table(file, columns=[*_KEY, *_EQUAL]).to_pylist()
    ]


def _metrics_different(one: Path, other: Path) -> list[str]:
    rows, others = (read_metrics(run / "metrics.jsonl") for run in (one, other))
    if len(rows) != len(others):
        return [f"number of iterations: {len(rows)} and {len(others)}"]
    pairs = list(zip(rows, others, strict=True))
    names = sorted({name for pair in pairs for row in pair for name in row})
    return [
        name
        for name in names
        if not name.startswith(_OF_THE_CLOCK) and any(row.get(name) != its.get(name) for row, its in pairs)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """A run under faults beside the same run without."""

    seed: int
    faults: Sequence[Fault]
    comparison: Comparison
    undisturbed_s: float
    disturbed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run whose driver was killed, and which was resumed, beside one that was not."""

    name: str
    has_been_killed: bool
    "false: it had ended before"
    is_equal: bool


def fault_figures(runs: Sequence[Disturbed], resumes: Sequence[Resumed]) -> dict[str, float]:
    """Figures of all runs together."""
    faults = [fault for run in runs for fault in run.faults]
    compared = [run.comparison for run in runs]
    seconds = [fault.recovery_s for fault in faults if fault.outcome == "recovered"]
    killed = [one.is_equal for one in resumes if one.has_been_killed]
    return {
        "seeds": float(len(runs)),
        "faults": float(len(faults)),
        **kinds_and_pools(faults),
        "faults_not_borne": float(sum(fault.outcome in ("not_found", "not_recovered") for fault in faults)),
        "samples": float(sum(one.num_samples for one in compared)),
        "samples_lost": float(sum(one.num_lost for one in compared)),
        "samples_duplicated": float(sum(one.num_duplicated for one in compared)),
        "samples_different": float(sum(one.num_different for one in compared)),
        "weights_equal": sum(one.is_equal for one in compared) / max(len(compared), 1),
        "recovery_s_median": statistics.median(seconds) if seconds else 0.0,
        "recovery_s_max": max(seconds, default=0.0),
        "resumes": float(len(killed)),
        "resumes_equal": sum(killed) / max(len(killed), 1),
    }


def kinds_and_pools(faults: Iterable[Fault]) -> dict[str, float]:
    """How many faults of each kind met each pool, by `KIND_POOL`."""
    found = Counter(f"{fault.kind}_{fault.pool.replace('-', '_')}" for fault in faults)
    return {name: float(found[name]) for name in sorted(found)}


def problems(
    runs: Sequence[Disturbed],
    resumes: Sequence[Resumed],
    *,
    most: int,
    num_resumes: int,
    figures: Mapping[str, float],
) -> list[str]:
    """What keeps the bar from being met, a line each; nothing when it is met."""
    lines = []
    for run in runs:
        if len(run.faults) < most:
            lines.append(
                f"seed {run.seed}: {len(run.faults)} faults, expected {most}: the run ended first, each time it went on"
            )
        lines += [
            f"seed {run.seed}: {fault.kind} of {fault.pool}: {fault.outcome} after {fault.recovery_s:.0f} s"
            for fault in run.faults
            if fault.outcome in ("not_found", "not_recovered")
        ]
        if not run.comparison.is_equal:
            lines.append(f"seed {run.seed}: differs from the undisturbed run: {run.comparison}")
    if most >= ALL_CARDS and not any(fault.pool == "follower" for run in runs for fault in run.faults):
        lines.append("no fault met another rank of an instance than its first")
    killed = [one for one in resumes if one.has_been_killed]
    if len(killed) < num_resumes:
        lines.append(f"{len(killed)} drivers killed, expected {num_resumes}: the other runs ended first")
    lines += [f"{one.name}: resumed, and differs from the whole run" for one in killed if not one.is_equal]
    lines += [
        f"moves between groups: {name} is {figures[name]:.0f}, expected 0"
        for name in GROUPS_ZERO
        if figures.get(name)
    ]
    if figures.get("verify_differences"):
        lines.append(f"rlhfspec verify: {figures['verify_differences']:.0f} differences, expected 0")
    ratio = figures.get("verify_over_generate", 0.0)
    if ratio >= 1.0:
        lines.append(f"rlhfspec verify took {ratio:.2f} times what generation took, expected less than 1")
    return lines


def kept(path: Path, stamp: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returned when it was last called with this stamp, else what it returns now, written to `path`.

    The stamp says what the part was made with: its code and its settings. Both are plain JSON.
    """
    if path.exists():
        tree = json.loads(path.read_text())
        if tree["stamp"] == dict(stamp):
            return tree["part"]
    part = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text(json.dumps({"stamp": dict(stamp), "part": part}, indent=2) + "\n")
    half.replace(path)
    return part
