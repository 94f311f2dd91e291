"""GRPO of adapters through the whole loop, by two trainers that share every weight, on a tiny random pair."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import peft
import pyarrow.parquet as pq
import pytest
import ray
import torch
from unhurried_refits import give_refits_time

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.run.stream import RolloutStream
from rlhfspec.cluster.system.system import System, running_system
from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import InstanceLost
from rlhfspec.core.metrics import read_metrics
from rlhfspec.engine.weights.chunks import model_checksum
from rlhfspec.engine.weights.loading import load_causal_lm

GROUPS, SIZE = 4, 3
NAMESPACE = "test-loop-grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A system after its two iterations."""

    system: System
    run_dir: RunDir

    def groups(self, iteration: int) -> dict[int, list[dict]]:
        """Rows of an iteration's samples by group."""
        groups = defaultdict(list)
        for row in pq.read_table(self.run_dir.rollouts_file(iteration)).to_pylist():
            groups[row["group_id"]].append(row)
        return groups


@pytest.fixture(scope="module")
def config(tiny_pair) -> Config:
    return config_from_dict(
        {
            "run": {"iterations": 2, "seed": 5},
            "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
            "data": {"task": "chain", "limit": 64},
            # a random model solves no chain; this reward differs within a group
            "reward": {"kind": "sample_rewards:vowel_share", "batch_size": 4},
            "sampling": {"max_new_tokens": 40},
            "speculation": {"policy": "fixed", "num_nodes": 8, "depth": 4, "branching": 2},
            "rollout": {"prompts_per_iteration": GROUPS, "samples_per_prompt": SIZE},
            "engine": {"max_running_samples": 4},
            "algorithm": {"kind": "grpo"},
            # minibatches that cut through groups
            "trainer": {
                "minibatch_size": 5,
                "learning_rate": 1e-2,
                "num_threads": 1,
                "lora": {"rank": 4},
                "block_samples": 3,
            },
            # the draft model learns with the adapters, in both trainers
            "drafter_training": {"mode": "cotrain", "learning_rate": 1e-2},
            "cluster": {"generation": {"num_actors": 1}, "trainer": {"num_actors": 2, "num_cpus": 0.25}},
        }
    )


@pytest.fixture(scope="module")
def trained(local_ray, config, tmp_path_factory) -> Iterator[Trained]:
    run_dir = RunDir.create(config, tmp_path_factory.mktemp("runs") / "grpo")
    session = RaySession(namespace=NAMESPACE, is_local=False, dashboard_url=None)
    with running_system(check_run(config, output_dir=Path.cwd()), session) as system:
        give_refits_time(system)
        train(system, run_dir, Reporter())
        yield Trained(system=system, run_dir=run_dir)


def test_the_check_says_what_share_learns(config, tmp_path):
    plan = check_run(config, output_dir=tmp_path)
    assert any("LoRA: 0.0" in line and "parameters learn" in line for line in plan.report)


@pytest.mark.ray
@pytest.mark.slow
def test_a_group_is_one_prompt_with_samples_that_differ(trained):
    seen: set[int] = set()
    for iteration in range(2):
        groups = trained.groups(iteration)
        assert [len(rows) for rows in groups.values()] == [SIZE] * GROUPS
        assert not seen & set(groups), "a group id was used twice"
        seen |= set(groups)
        for rows in groups.values():
            assert len({row["prompt_id"] for row in rows}) == 1
            assert len({tuple(row["response_token_ids"]) for row in rows}) > 1


@pytest.mark.ray
@pytest.mark.slow
def test_every_figure_is_finite_and_the_groups_are_counted(trained):
    metrics = read_metrics(trained.run_dir.metrics_file)
    assert len(metrics) == 2
    for iteration, row in enumerate(metrics):
        assert all(math.isfinite(value) for value in row.values())
        equal = [len({row["reward"] for row in rows}) == 1 for rows in trained.groups(iteration).values()]
        assert row["learner/num_groups"] == GROUPS
        assert row["learner/num_zero_advantage_groups"] == sum(equal) < GROUPS
        assert row["learner/grad_norm"] > 0.0
        assert abs(row["learner/ratio_at_first_minibatch"] - 1.0) < 1e-4, "sampled from what was merged"
        assert "learner/value_loss" not in row, "GRPO has no critic"
    assert metrics[0]["learner/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[1]["learner/reference_kl"] > metrics[0]["learner/reference_kl"]


@pytest.mark.ray
@pytest.mark.slow
def test_the_merged_model_and_the_adapter_are_one_model_that_has_learned(trained, tiny_pair):
    published = trained.system.target.manifest
    merged = load_causal_lm(str(trained.run_dir.checkpoint_dir("target")), "float32")
    assert (published.weight_version, published.checksum) == (2, model_checksum(merged))
    adapter = trained.run_dir.checkpoint_dir("adapter")
    assert verify_checkpoint(adapter)["parameter_checksum"] == published.checksum
    base = load_causal_lm(str(tiny_pair.target), "float32")
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        plain, expected = base(ids).logits, merged(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, adapter)(ids).logits
    assert torch.allclose(adapted, expected, atol=1e-5)
    assert not torch.allclose(plain, expected, atol=1e-3)


@pytest.mark.ray
@pytest.mark.slow
def test_a_version_of_the_draft_model_goes_with_each_of_the_target(trained, tiny_pair):
    metrics = read_metrics(trained.run_dir.metrics_file)
    assert [row["draft/weight_version"] for row in metrics] == [1.0, 2.0]
    assert all(row["draft/refit_taken"] == 1.0 for row in metrics)
    assert 0.0 < metrics[1]["draft/cotrain_kl"] < metrics[0]["draft/cotrain_kl"]
    assert trained.system.draft is not None
    published = trained.system.draft.manifest
    kept = load_causal_lm(str(trained.run_dir.checkpoint_dir("draft")), "float32")
    first = load_causal_lm(str(tiny_pair.draft), "float32")
    assert published.weight_version == 2
    assert published.checksum == model_checksum(kept) != model_checksum(first)


@pytest.mark.ray
@pytest.mark.slow
def test_a_dead_trainer_is_named_by_whoever_waits_for_the_group(trained):
    system = trained.system
    requests = system.cursor.next_requests(GROUPS, SIZE, system.sampling)
    batch = RolloutStream(system, Reporter()).collect(requests).rollouts
    ray.kill(ray.get_actor("trainer-1", namespace=NAMESPACE))
    with pytest.raises(InstanceLost, match="trainer-1 died while the loop waited for 'update"):
        system.trainers.update(batch)
    with pytest.raises(InstanceLost, match="trainer-1 died while the loop waited"):
        system.trainers.take()
