"""Runs beside their simulation: what is taken from a run and what is not, the watch over the cores, deviations."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hand_profile import hand_cost, hand_profile

from rlhfspec.benchmarks.simulated_runs.compared_runs import (
    Batch,
    Compared,
    RecordedRun,
    UpdateSeconds,
    calibrated,
    compare,
    read_run,
    shared,
    simulate,
    summary,
    update_s,
)
from rlhfspec.benchmarks.simulated_runs.machine import (
    Background,
    CoreWatch,
    Look,
    MachineProfile,
    all_ticks,
    background,
    idle,
    seconds_ratio,
    slowdown,
)
from rlhfspec.benchmarks.support.result import ROOT
from rlhfspec.core.awake import looking
from rlhfspec.core.config_io import dump_config, load_config
from rlhfspec.policies.simulate.simulation_records import Samples

QUIET = Background(generating=0.0, resting=0.0)
MACHINE = MachineProfile(alone=hand_profile(0.8, hand_cost()), slowdown=1.25)


def made_run(
    *settings: str, lengths: Sequence[Sequence[int]], background: Background = QUIET, trained: float = 1.0
) -> RecordedRun:
    """A run without metrics yet."""
    config = load_config(
        ROOT / "configs" / "algorithms" / "ppo.yaml", ["sampling.max_new_tokens=64", *settings]
    )
    batches = []
    for tokens in lengths:
        count = len(tokens)
        samples = Samples(
            response_tokens=np.array(tokens), prompt_tokens=np.full(count, 8), speed=np.ones(count)
        )
        batches.append(Batch(samples=samples, trained=np.arange(count) < trained * count))
    return RecordedRun(config=config, batches=batches, metrics=[{}] * len(batches), background=background)


def with_seconds(run: RecordedRun, update: UpdateSeconds, factor: float = 1.0) -> RecordedRun:
    """The run as the simulator says that it was."""
    rollouts, steps = simulate(run, MACHINE, update, cores=2)
    metrics = []
    for batch, rollout_s, step_s in zip(run.batches, rollouts, steps, strict=True):
        whole_s = update_s(run, batch, update) * factor
        metrics.append(
            {
                "time/generate_s": rollout_s,
                "time/iteration_s": step_s,
                "time/publish_s": update.publication_s,
                "time/update_s": step_s - rollout_s - update.publication_s - update.other_s
                if run.staleness
                else whole_s,
            }
        )
    return replace(run, metrics=metrics)


LENGTHS = [[20, 40], [10, 60], [30, 30], [64, 12], [25, 50], [33, 21]]
UPDATE = UpdateSeconds(token_s=0.004, publication_s=0.05, other_s=0.02)


@pytest.mark.parametrize("seen", [QUIET, Background(generating=0.5, resting=0.1)])
def test_what_is_taken_from_a_run_in_turns_is_what_made_it(seen: Background) -> None:
    bare = made_run(lengths=LENGTHS, background=seen)
    machine = shared(bare, MACHINE, 2)
    run = with_seconds(bare, UPDATE, machine.factor(0, trainer=True))
    got = calibrated(run, machine)
    assert (got.token_s, got.publication_s, got.other_s) == pytest.approx((0.004, 0.05, 0.02))
    same = compare("run", run, MACHINE, got, cores=2)
    assert (same.rollout_deviation, same.step_deviation) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_compared_iterations_are_not_those_that_are_taken() -> None:
    bare = made_run(lengths=LENGTHS)
    run = with_seconds(bare, UPDATE)
    # even ones twice as slow: what is predicted stays
    slow = [
        {name: value * (1 if number % 2 else 2) for name, value in row.items()}
        for number, row in enumerate(run.metrics)
    ]
    slower = replace(run, metrics=slow)
    update = calibrated(slower, shared(run, MACHINE, 2))
    assert update.token_s == pytest.approx(0.004)
    assert compare("run", slower, MACHINE, update, cores=2).step_deviation == pytest.approx(-0.5)


def test_ahead_the_update_costs_what_is_beside_it() -> None:
    run = made_run("rollout.max_staleness=1", "algorithm.correction.kind=tis", lengths=LENGTHS)
    rollouts, steps = simulate(run, MACHINE, UPDATE, cores=2)
    alone_s = [update_s(run, batch, UPDATE) for batch in run.batches]
    # two instances and the trainer on two cores: nobody has one for himself
    for rollout_s, step_s, whole_s in zip(rollouts, steps, alone_s, strict=True):
        assert step_s > max(rollout_s, whole_s) + UPDATE.publication_s + UPDATE.other_s
        assert step_s < rollout_s + whole_s * 1.25 * 1.5 + 0.07
    assert list(run.compared) == [1, 2, 3, 4]


def test_what_has_no_gradient_is_not_trained_and_old_log_probabilities_take_a_forward() -> None:
    # the bound on values is of no use without a critic
    grpo = ("algorithm.kind=grpo", "algorithm.clip_value=0.2", "rollout.samples_per_prompt=2")
    turns = made_run(*grpo, lengths=LENGTHS, trained=0.5)
    batch = turns.batches[0]
    assert (batch.tokens, batch.trained_tokens) == (76, 28)
    assert update_s(turns, batch, UPDATE) == pytest.approx(0.004 * 28)
    ahead = made_run(
        *grpo,
        "rollout.max_staleness=1",
        "algorithm.correction.kind=tis",
        lengths=LENGTHS,
        trained=0.5,
    )
    assert update_s(ahead, batch, UPDATE) == pytest.approx(0.004 * (28 + 76 / 3))


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    run = made_run(lengths=LENGTHS)
    dump_config(run.config, tmp_path / "config.yaml")
    (tmp_path / "rollouts").mkdir()
    table = pa.table(
        {
            "prompt_token_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
            "response_token_ids": pa.array([[1], [3, 4, 5]], pa.list_(pa.int32())),
            "advantage": pa.array([0.0, 0.5], pa.float32()),
            "group_id": pa.array([4, 4], pa.int64()),
        }
    )
    pq.write_table(table, tmp_path / "rollouts" / "iteration_0000.parquet")
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 0, "time/update_s": 1.0, "time/iteration_s": 3.0}\n'
    )
    read = read_run(tmp_path, background=QUIET)
    (batch,) = read.batches
    assert batch.samples.prompt_tokens.tolist() == [2, 1]
    assert batch.samples.response_tokens.tolist() == [1, 3]
    assert batch.samples.group is not None and batch.samples.group.tolist() == [4, 4]
    assert batch.trained.tolist() == [False, True] and batch.trained_tokens == 4
    assert read.update_s.tolist() == [1.0] and read.other_s.tolist() == [2.0]


def test_two_profiles_at_once_say_how_much_slower_a_busy_machine_is() -> None:
    assert slowdown(1.25, background=0.0) == pytest.approx(1.25)
    # the other core half busy: one alone took (1 + 0.25 / 2) times as long already
    assert slowdown(1.25 / 1.125, background=0.5) == pytest.approx(1.25)
    assert slowdown(0.97, background=0.0) == 1.0
    assert slowdown(1.2, background=1.0) == 1.2
    slow = idle(MACHINE.alone, 0.5)
    assert seconds_ratio(MACHINE.alone, [slow, MACHINE.alone]) == pytest.approx(1.5)


def test_others_are_told_apart_from_instances_and_trainer() -> None:
    def look(busy: int, passed: int, instances: int, trainer: int) -> Look:
        return Look(busy=busy, passed=passed, instances=instances, trainer=trainer)

    looks = [
        look(0, 0, 0, 0),
        look(15, 20, 10, 0),
        look(30, 40, 20, 0),
        look(41, 60, 20, 10),
        look(52, 80, 20, 20),
    ]
    seen = background(looks, cores=2)
    # 5 ticks beside an instance's 10 in 10 of the clock, 1 beside the trainer's
    assert (seen.generating, seen.resting) == pytest.approx((0.5, 0.1))
    assert background(looks[:1], cores=2) == QUIET
    assert all_ticks("cpu  1 2 3 40 50 6 7 8 9 10\ncpu0 1\n") == (19, 90)


def test_the_watch_sees_a_process_below() -> None:
    busy = "while True: pass  # an instance"
    child = subprocess.Popen([sys.executable, "-c", busy])
    try:
        watch = CoreWatch(lambda line: busy in line)
        with looking(watch.look, 0.05):
            while not watch._looks or not watch._looks[-1].instances:
                time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    idle_watch = CoreWatch(lambda line: busy in line, is_on=lambda: False)
    idle_watch.look()
    assert not idle_watch._looks and watch._looks[-1].trainer == 0


def test_deviations_of_a_core_each_are_apart() -> None:
    def row(name: str, rollout: float, step: float) -> Compared:
        return Compared(
            name=name,
            background=QUIET,
            rollout_s=1.0,
            simulated_rollout_s=1.0 + rollout,
            step_s=2.0,
            simulated_step_s=2.0 * (1.0 + step),
        )

    figures = summary(
        {
            "one_core_each": [row("a", 0.5, 0.03), row("b", 0.5, -0.08)],
            "demo": [row("c", 0.1, 0.02), row("d", -0.2, 0.04)],
        }
    )
    assert figures == pytest.approx(
        {"simulator_step_error": 0.08, "simulator_own_median_error": 0.07, "simulator_own_worst_error": 0.2}
    )
    assert summary({}) == {}
