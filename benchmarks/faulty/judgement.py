"""What the parts of `bench faults` add up to: figures, and what is wrong in a line each."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.faulty.comparison import Comparison
from benchmarks.faulty.injection import Fault


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
        "time_over_undisturbed": statistics.median(run.disturbed_s / run.undisturbed_s for run in runs),
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
    killed = [one for one in resumes if one.has_been_killed]
    if len(killed) < num_resumes:
        lines.append(f"{len(killed)} drivers killed, expected {num_resumes}: the other runs ended first")
    lines += [f"{one.name}: resumed, and differs from the whole run" for one in killed if not one.is_equal]
    if figures.get("verify_differences"):
        lines.append(f"rlhfspec verify: {figures['verify_differences']:.0f} differences, expected 0")
    ratio = figures.get("verify_over_generate", 0.0)
    if ratio >= 1.0:
        lines.append(f"rlhfspec verify took {ratio:.2f} times what generation took, expected less than 1")
    return lines
