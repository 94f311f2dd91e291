"""Runs of this machine beside their simulation: one core each for instance and trainer, and two instances."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.moving.wide_pair import wide_pair
from benchmarks.pipeline import CORRECTED, ONE_CORE_EACH
from benchmarks.real.model import NAME
from benchmarks.rlhf import CONFIGS, train
from benchmarks.simulated_runs.core_watch import CoreWatch
from benchmarks.simulated_runs.machine_profile import MachineProfile, measure_machine
from benchmarks.simulated_runs.prediction import Compared, calibrated, compare, shared
from benchmarks.simulated_runs.recorded_run import RecordedRun, read_run
from benchmarks.support.result import ROOT
from benchmarks.support.workload import default_cache_dir, demo_workload

CORES = 2
"That the processes of a run get, all of them together."
BUDGET_S = {"quick": 8.0, "default": 15.0, "full": 40.0}
"Of a profile."
MOST_OTHERS = 0.7
"Cores; Ray's workers are niced, so that strangers get more than an even share of them."
STALENESS: tuple[Sequence[str], ...] = ((), ("rollout.max_staleness=1", CORRECTED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A config, run in turns and one version ahead."""

    name: str
    config: Path
    pair: str
    "whose profile is taken"
    settings: Sequence[str]
    iterations: int
    "of the default mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What a profile is measured of."""

    config: Path
    settings: Sequence[str] = ()


def own_runs(out: Path, mode: str, console: Console) -> Iterator[dict[str, float]]:
    """Measure, run, simulate; figures so far after each case. What is not here is skipped, and said so."""
    work = out / "simulated_runs"
    work.mkdir(parents=True, exist_ok=True)
    pairs, cases = {"demo": Pair(config=CONFIGS["ppo"])}, [_one_core_each(mode)]
    if mode != "quick":
        pairs["wide"] = Pair(config=CONFIGS["ppo"], settings=_wide_settings())
        cases += [_demo(), _wide()]
        if not (default_cache_dir() / "models" / NAME / "config.json").is_file():
            console.print(f"skipped: {NAME} is not in the cache; `rlhfspec models get {NAME}` fetches it")
        else:
            pairs["smollm2"] = Pair(config=ROOT / "configs" / "smollm2_grpo.yaml")
            cases.append(_smollm2())
    figures: dict[str, float] = {}
    compared: dict[str, list[Compared]] = {}
    machines: dict[str, MachineProfile] = {}
    for case in cases:
        if case.pair not in machines:
            pair = pairs[case.pair]
            machine = machines[case.pair] = measure_machine(
                pair.config, pair.settings, work, f"profile-{case.pair}", budget_s=BUDGET_S[mode]
            )
            figures[f"{case.pair}_core_slowdown"] = machine.slowdown
            console.print(f"{case.pair}: {machine.slowdown:.2f} times as slow beside a busy core")
        compared[case.name] = _compared(case, machines[case.pair], work, mode)
        console.print(_table(compared[case.name]))
        busiest = max(row.background.generating for row in compared[case.name])
        if busiest > MOST_OTHERS:
            console.print(
                f"the machine was not quiet: {busiest:.1f} cores were busy with something else; expected at most "
                f"{MOST_OTHERS:g}: run it again with nothing beside it, these deviations say little"
            )
        for row in compared[case.name]:
            figures |= {
                f"{row.name}_others_busy": row.background.generating,
                f"{row.name}_rollout_s": row.rollout_s,
                f"{row.name}_rollout_deviation": row.rollout_deviation,
                f"{row.name}_step_s": row.step_s,
                f"{row.name}_step_deviation": row.step_deviation,
            }
        yield figures | summary(compared)


def summary(compared: dict[str, list[Compared]]) -> dict[str, float]:
    """The figures with bars: of steps with a core each, and of all that two instances did."""
    each = compared.get("one_core_each", [])
    others = [row for name, rows in compared.items() if name != "one_core_each" for row in rows]
    figures = {}
    if each:
        figures["simulator_step_error"] = max(abs(row.step_deviation) for row in each)
    if others:
        errors = [abs(error) for row in others for error in (row.rollout_deviation, row.step_deviation)]
        figures["simulator_own_median_error"] = statistics.median(errors)
        figures["simulator_own_worst_error"] = max(errors)
    return figures


def _compared(case: Case, machine: MachineProfile, work: Path, mode: str) -> list[Compared]:
    iterations = {"quick": 4, "default": case.iterations, "full": 2 * case.iterations}[mode]
    runs: list[RecordedRun] = []
    for staleness, more in enumerate(STALENESS):
        settings = [*case.settings, f"run.iterations={iterations}", *more]
        name = f"{case.name}_staleness{staleness}"
        with CoreWatch(_is_instance, _is_trainer, is_on=lambda name=name: _is_under_way(work, name)) as watch:
            train(case.config, work, name, settings)
        runs.append(read_run(_newest(work, name), background=watch.background))
    update = calibrated(runs[0], shared(runs[0], machine, CORES))
    return [
        compare(f"{case.name}_staleness{run.staleness}", run, machine, update, cores=CORES) for run in runs
    ]


def _newest(work: Path, name: str) -> Path:
    return max((work / "runs").glob(f"{name}-2*"))


def _is_instance(line: str) -> bool:
    return line.startswith("ray::GenerationActor")


def _is_trainer(line: str) -> bool:
    return line.startswith("ray::TrainerActor")


def _is_under_way(work: Path, name: str) -> bool:
    """Whether a run has got beyond its first iteration."""
    return any((work / "runs").glob(f"{name}-2*/metrics.jsonl"))


def _one_core_each(mode: str) -> Case:
    return Case(
        name="one_core_each",
        config=CONFIGS["grpo"],
        pair="demo",
        settings=[*ONE_CORE_EACH, f"rollout.prompts_per_iteration={12 if mode == 'quick' else 24}"],
        iterations=7,
    )


def _demo() -> Case:
    return Case(
        name="demo",
        config=CONFIGS["ppo"],
        pair="demo",
        # of 64 a rollout takes a quarter of a second, a dozen decode steps
        settings=("rollout.prompts_per_iteration=128",),
        iterations=7,
    )


def _wide_settings() -> Sequence[str]:
    paths = wide_pair(demo_workload(1).paths)
    return (f"models.target={paths.target}", f"models.draft={paths.draft}")


def _wide() -> Case:
    return Case(
        name="wide",
        config=CONFIGS["ppo"],
        pair="wide",
        settings=[*_wide_settings(), "rollout.prompts_per_iteration=24"],
        iterations=6,
    )


def _smollm2() -> Case:
    return Case(
        name="smollm2",
        config=ROOT / "configs" / "smollm2_grpo.yaml",
        pair="smollm2",
        settings=("speculation.policy=off", "speculation.drafter=none", "rollout.samples_per_prompt=4"),
        iterations=5,
    )


def _table(rows: Sequence[Compared]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in (
        "run",
        "other cores",
        "rollout s",
        "simulated",
        "deviation",
        "step s",
        "simulated",
        "deviation",
    ):
        table.add_column(title, justify="left" if title == "run" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.background.generating:.2f}",
            f"{row.rollout_s:.2f}",
            f"{row.simulated_rollout_s:.2f}",
            f"{row.rollout_deviation:+.0%}",
            f"{row.step_s:.2f}",
            f"{row.simulated_step_s:.2f}",
            f"{row.step_deviation:+.0%}",
        )
    return table
