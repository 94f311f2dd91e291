"""Runs of this machine beside their simulation: one core each for instance and trainer, and two instances.

Generation is predicted from a profile that was measured before the run, and the lengths of its responses. Updates are
predicted from seconds a token of the *synchronous* run's odd iterations, which are not compared, their publication and
what else they did likewise: what a run ahead gains or loses beside its rollouts is the simulator's to say.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from ...actors.generation.decode_loop import GATHER_S
from ...cluster.folder.rollouts import rollout_files
from ...core.awake import looking
from ...core.config import Config
from ...core.config_io import load_config
from ...core.metrics import read_metrics
from ...core.settings.simulated_cluster import SimulatedClusterConfig
from ...policies.simulate.cluster_simulation import simulate_cluster
from ...policies.simulate.described_cluster import describe
from ...policies.simulate.simulated_instance import SharedMachine
from ...policies.simulate.simulation_records import Samples
from ..moving.downtime import wide_pair
from ..pipeline import CORRECTED, ONE_CORE_EACH
from ..support.runs import GRPO, PPO, SMOLLM2, train
from ..support.workload import REAL_MODEL, default_cache_dir, demo_workload
from .machine import INTERVAL_S, Background, CoreWatch, MachineProfile, measure_machine

_COLUMNS = ("prompt_token_ids", "response_token_ids", "advantage", "group_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one update learns from."""

    samples: Samples
    trained: np.ndarray
    "[n] samples that have a gradient: the others of a group whose rewards are equal have none"

    @property
    def tokens(self) -> int:
        """Of all samples, prompts included."""
        return int((self.samples.prompt_tokens + self.samples.response_tokens).sum())

    @property
    def trained_tokens(self) -> int:
        """Of those with a gradient."""
        return int((self.samples.prompt_tokens + self.samples.response_tokens)[self.trained].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One entry of `batches` and of `metrics` an iteration."""

    config: Config
    batches: Sequence[Batch]
    metrics: Sequence[Mapping[str, float]]
    background: Background
    "neither instances nor trainer: scheduler, rewards, driver, Ray, and whatever else ran here"

    @property
    def staleness(self) -> int:
        """K."""
        return self.config.rollout.max_staleness

    @property
    def compared(self) -> range:
        """Iterations that are: the first fills caches and the pipeline, the last of a run ahead samples nothing."""
        return range(1, len(self.metrics) - (1 if self.staleness else 0))

    def seconds(self, name: str) -> np.ndarray:
        """[iterations] of a metric `time/NAME_s`; 0 where it is not set."""
        return np.array([row.get(f"time/{name}_s", 0.0) for row in self.metrics])

    @property
    def update_s(self) -> np.ndarray:
        """[iterations] of each update, whatever went on beside it."""
        return self.seconds("update") + self.seconds("update_hidden")

    @property
    def other_s(self) -> np.ndarray:
        """[iterations] of what is neither generation nor update nor publication: scores, refits, files."""
        return self.seconds("iteration") - sum(
            self.seconds(name) for name in ("generate", "update", "publish")
        )


def read_run(folder: Path, *, background: Background) -> RecordedRun:
    """Read a run folder; `background` was measured meanwhile. Raises InputError for one that cannot be read."""
    return RecordedRun(
        config=load_config(folder / "config.yaml"),
        batches=[_batch(file) for file in rollout_files(folder)],
        metrics=read_metrics(folder / "metrics.jsonl"),
        background=background,
    )


def _batch(file: Path) -> Batch:
    table = pq.read_table(file, columns=list(_COLUMNS))

    def lengths(column: str) -> np.ndarray:
        chunks = [np.asarray(chunk.value_lengths(), dtype=np.int64) for chunk in table[column].chunks]
        return np.concatenate([np.zeros(0, dtype=np.int64), *chunks])

    prompts, responses, *_ = _COLUMNS
    advantage = np.array(table["advantage"].to_pylist(), dtype=float)
    return Batch(
        samples=Samples(
            response_tokens=lengths(responses),
            prompt_tokens=lengths(prompts),
            speed=np.ones(len(table)),
            group=np.array(table["group_id"].to_pylist(), dtype=np.int64),
        ),
        # none is known where the run broke off
        trained=np.isnan(advantage) | (advantage != 0.0),
    )


FORWARD_SHARE = 1 / 3
"Of a trained token's seconds: a forward's, as a backward pass is two of them."
MESSAGE_S = 1e-3
"A call between two actors of one machine."


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSeconds:
    """What is taken from a synchronous run."""

    token_s: float
    "of a trained token, as with nothing else busy"
    publication_s: float
    other_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run beside its simulation; medians over the iterations that are compared."""

    name: str
    background: Background
    "cores that neither instances nor trainer kept busy"
    rollout_s: float
    simulated_rollout_s: float
    step_s: float
    simulated_step_s: float

    @property
    def rollout_deviation(self) -> float:
        """Simulated over measured, less one."""
        return self.simulated_rollout_s / self.rollout_s - 1.0

    @property
    def step_deviation(self) -> float:
        """The same of the step."""
        return self.simulated_step_s / self.step_s - 1.0


def shared(run: RecordedRun, machine: MachineProfile, cores: int) -> SharedMachine:
    """The machine as the run had it."""
    seen = run.background
    return SharedMachine(
        cores=cores, slowdown=machine.slowdown, background=seen.generating, resting=seen.resting
    )


def calibrated(run: RecordedRun, machine: SharedMachine) -> UpdateSeconds:
    """Take from a synchronous run what its odd iterations say; the even ones are compared."""
    odd = [number for number in run.compared if number % 2]
    trained = np.array([run.batches[number].trained_tokens for number in odd])
    return UpdateSeconds(
        token_s=float(np.median(run.update_s[odd] / trained)) / machine.factor(0, trainer=True),
        publication_s=float(np.median(run.seconds("publish")[odd])),
        other_s=float(np.median(run.other_s[odd])),
    )


def compare(
    name: str, run: RecordedRun, machine: MachineProfile, update: UpdateSeconds, *, cores: int
) -> Compared:
    """Simulate a run's iterations, and put the medians beside each other."""
    rollouts, steps = simulate(run, machine, update, cores=cores)
    kept = [number for number in run.compared if run.staleness or not number % 2]

    def middle(values: Sequence[float] | np.ndarray) -> float:
        return float(np.median([values[number] for number in kept]))

    return Compared(
        name=name,
        background=run.background,
        rollout_s=middle(run.seconds("generate")),
        simulated_rollout_s=middle(rollouts),
        step_s=middle(run.seconds("iteration")),
        simulated_step_s=middle(steps),
    )


def simulate(
    run: RecordedRun, machine: MachineProfile, update: UpdateSeconds, *, cores: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of every iteration's generation and of the iteration."""
    config = run.config
    generation = config.cluster.generation
    described = describe(
        SimulatedClusterConfig.model_validate(
            {
                "pools": {
                    "instances": generation.num_actors,
                    "trainer_gpus": 1,
                    "slots": config.engine.max_running_samples,
                    "report_s": GATHER_S,
                    "message_s": MESSAGE_S,
                    "cores": cores,
                    "core_slowdown": machine.slowdown,
                    "background": run.background.generating,
                    "resting_background": run.background.resting,
                },
                "lengths": {
                    "samples": len(run.batches[0].samples),
                    "max_new_tokens": config.sampling.max_new_tokens,
                },
                # the seconds of each batch are given below
                "learner": {"measured_s": 0.0},
                "step": {
                    "staleness": run.staleness,
                    "steps": len(run.batches),
                    "publication_s": update.publication_s,
                    "other_s": update.other_s,
                },
                "reallocation": {
                    "policy": config.reallocation.policy,
                    "poll_interval_s": config.reallocation.interval_s,
                },
            }
        )
    )
    described = replace(
        described,
        batches=tuple(batch.samples for batch in run.batches),
        training_s=tuple(update_s(run, batch, update) for batch in run.batches),
    )
    made = simulate_cluster(described, profile=machine.alone)
    phase = made.plain if config.speculation.policy == "off" else made.speculative
    return phase.steps.rollout_s, phase.steps.step_s


def update_s(run: RecordedRun, batch: Batch, update: UpdateSeconds) -> float:
    """Seconds of a batch's update with nothing beside it.

    Ahead of learning the trainer computes the old log-probabilities anew: a forward over all samples, but where a
    critic asks for one anyway.
    """
    more = run.staleness > 0 and run.config.algorithm.kind != "ppo"
    tokens = batch.trained_tokens + (FORWARD_SHARE * batch.tokens if more else 0.0)
    return update.token_s * tokens


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
    pairs, cases = {"demo": Pair(config=PPO)}, [_one_core_each(mode)]
    if mode != "quick":
        pairs["wide"] = Pair(config=PPO, settings=_wide_settings())
        cases += [_demo(), _wide()]
        if not (default_cache_dir() / "models" / REAL_MODEL / "config.json").is_file():
            console.print(
                f"skipped: {REAL_MODEL} is not in the cache; `rlhfspec models get {REAL_MODEL}` fetches it"
            )
        else:
            pairs["smollm2"] = Pair(config=SMOLLM2)
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
        watch = CoreWatch(_is_instance, _is_trainer, is_on=lambda name=name: _is_under_way(work, name))
        with looking(watch.look, INTERVAL_S):
            made = train(case.config, work, name, settings)
        runs.append(read_run(made.folder, background=watch.background))
    update = calibrated(runs[0], shared(runs[0], machine, CORES))
    return [
        compare(f"{case.name}_staleness{run.staleness}", run, machine, update, cores=CORES) for run in runs
    ]


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
        config=GRPO,
        pair="demo",
        settings=[*ONE_CORE_EACH, f"rollout.prompts_per_iteration={12 if mode == 'quick' else 24}"],
        iterations=7,
    )


def _demo() -> Case:
    return Case(
        name="demo",
        config=PPO,
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
        config=PPO,
        pair="wide",
        settings=[*_wide_settings(), "rollout.prompts_per_iteration=24"],
        iterations=6,
    )


def _smollm2() -> Case:
    return Case(
        name="smollm2",
        config=SMOLLM2,
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
