"""Evaluations within a run on real actors: they change no training bit, repeat their own, and keep the best weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.placement.ray_session import RaySession
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.run.evaluate import evaluate, evaluation_requests
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.run.stream import RolloutStream
from rlhfspec.cluster.system.system import running_system
from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import Rollout

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ITERATIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What is left of a run, and one more evaluation of its last weights, the scheduler dying on the way."""

    run_dir: RunDir
    checksum: str
    again: list[Rollout]
    notes: list[str]


class Notes(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def config(tiny_pair, **evaluation) -> Config:
    return config_from_dict(
        {
            "run": {"iterations": ITERATIONS, "seed": 5, "checkpoint_every": 1, "keep_checkpoints": 2},
            "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "sample_rewards:vowel_share", "batch_size": 4},
            "sampling": {"max_new_tokens": 24},
            "speculation": {"policy": "fixed", "num_nodes": 8, "depth": 4, "branching": 2},
            "rollout": {"prompts_per_iteration": 6},
            "engine": {"max_running_samples": 4},
            "algorithm": {"kind": "ppo"},
            "trainer": {"minibatch_size": 3, "learning_rate": 3e-3, "num_threads": 1},
            "drafter_training": {"budget_share": 1.0, "max_passes": 1},
            "evaluation": evaluation,
        }
    )


def run(made: Config, folder: Path, namespace: str) -> Ended:
    run_dir, report = RunDir.create(made, folder), Notes()
    session = RaySession(namespace=namespace, is_local=False, dashboard_url=None)
    plan, again = check_run(made, output_dir=folder.parent), []
    with running_system(plan, session) as system:
        train(system, run_dir, report)
        if plan.inputs.evaluation is not None:
            requests = evaluation_requests(plan.inputs.evaluation, asking=900)
            again = evaluate(RolloutStream(system, report), requests).collected.rollouts
        checksum = system.target.manifest.checksum
    return Ended(run_dir=run_dir, checksum=checksum, again=again, notes=report.notes)


@pytest.fixture(scope="module")
def evaluated(local_ray, tiny_pair, tmp_path_factory) -> Ended:
    made = config(
        tiny_pair,
        every=2,
        data={"task": "chain", "limit": 5},
        samples_per_prompt=2,
        temperature=0.7,
        max_new_tokens=30,
    )
    return run(made, tmp_path_factory.mktemp("runs") / "evaluated", "test-evaluate")


@pytest.fixture(scope="module")
def plain(local_ray, tiny_pair, tmp_path_factory) -> Ended:
    # on one instance: no bit depends on their number
    alone = config(tiny_pair).model_dump() | {"cluster": {"generation": {"num_actors": 1}}}
    return run(config_from_dict(alone), tmp_path_factory.mktemp("runs") / "plain", "test-evaluate-not")


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_training_is_the_same_to_the_bit_with_evaluations_or_without(evaluated, plain):
    assert evaluated.checksum == plain.checksum
    for iteration in range(ITERATIONS):
        pairs = zip(
            rows(evaluated.run_dir.rollouts_file(iteration)),
            rows(plain.run_dir.rollouts_file(iteration)),
            strict=True,
        )
        for one, other in pairs:
            for column in ("sample_index", "response_token_ids", "policy_logprobs", "reward", "advantage"):
                assert one[column] == other[column], column
            assert one["advantage"] is not None


def test_the_same_weights_give_the_same_samples_and_the_samples_differ_among_themselves(evaluated):
    before = rows(evaluated.run_dir.evaluated_file(ITERATIONS))
    assert [row["response_token_ids"] for row in before] == [
        rollout.completion.token_ids.tolist() for rollout in evaluated.again
    ]
    assert {row["stream"] for row in before} == {"eval"}
    assert len({tuple(row["response_token_ids"]) for row in before}) == len(before) == 10


def test_the_first_weights_every_second_and_the_last_are_evaluated_and_said(evaluated):
    told = [json.loads(line) for line in evaluated.run_dir.evaluations_file.read_text().splitlines()]
    assert [one["num_iterations"] for one in told] == [0, 2, 3]
    assert [one["weight_version"] for one in told] == [0, 2, 3]
    metrics = read_metrics(evaluated.run_dir.metrics_file)
    assert ["eval/reward_mean" in row for row in metrics] == [False, True, True]
    assert metrics[1]["eval/reward_mean"] == told[1]["eval/reward_mean"]
    assert metrics[1]["time/iteration_s"] > metrics[1]["time/evaluate_s"] > 0.0
    # a share of vowels is neither right nor wrong
    assert "eval/accuracy" not in metrics[1] and "eval/pass_at_k" not in metrics[1]
    assert sum(note.startswith(("evaluation after", "evaluation before")) for note in evaluated.notes) == 3
    assert any(note.startswith("evaluation of 5 prompts with 2 samples each") for note in evaluated.notes)


def test_the_best_evaluated_weights_are_kept_and_the_newest_of_the_others(evaluated):
    told = [json.loads(line) for line in evaluated.run_dir.evaluations_file.read_text().splitlines()]
    best = [one for one in told if one["is_best"]]
    folder = evaluated.run_dir.checkpoint_dir("best")
    assert folder.is_dir() == bool(best)
    if best:
        verify_checkpoint(folder)
        assert best[-1]["eval/reward_mean"] == max(one["eval/reward_mean"] for one in told)
        manifest = json.loads((folder / "rlhfspec-manifest.json").read_text())
        assert manifest["weight_version"] == best[-1]["weight_version"]
    kept = sorted(path.name for path in folder.parent.iterdir() if path.name != "best")
    assert kept == ["draft", "draft_0001", "draft_0002", "target", "target_0001", "target_0002"]
