"""Runs that begin the next batch ahead end with the bits of one that does not, whatever becomes of the attempts."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.system.system import System, running_system
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.metrics import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ITERATIONS = 3
SAME = (
    "sample_index",
    "response_token_ids",
    "policy_logprobs",
    "sampling_logprobs",
    "reward",
    "advantage",
    "weight_version",
    "finish_reason",
)
"Columns of a rollout that no attempt may change."


def config_of(tiny_pair, look_ahead: object, drafter: str, **sections: dict) -> Config:
    drafts = {
        "model": {"policy": "fixed", "num_nodes": 8, "depth": 4, "branching": 2},
        "none": {"policy": "off"},
    }
    return config_from_dict(
        {
            "run": {"iterations": ITERATIONS, "seed": 5, "checkpoint_every": 0},
            "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "sample_rewards:vowel_share", "batch_size": 4},
            "sampling": {"max_new_tokens": 60},
            "speculation": {"drafter": drafter, **drafts[drafter]},
            "rollout": {"prompts_per_iteration": 4, "samples_per_prompt": 3, "look_ahead": look_ahead},
            "engine": {"max_running_samples": 4},
            "algorithm": {"kind": "grpo"},
            # near enough that most of an attempt is proved, far enough that some part
            "trainer": {"minibatch_size": 6, "learning_rate": 3e-4, "num_threads": 1},
            "drafter_training": {"refit": False},
            "cluster": {"generation": {"num_actors": 1 if look_ahead == "off" else 2}},
        }
        | sections
    )


class KillsBesideAnUpdate(Reporter):
    """Kills an instance while the trainer learns for the second time: its attempts are lost."""

    def __init__(self, system: System) -> None:
        super().__init__()
        self.system, self.num_updates, self.killed = system, 0, ""

    def progress(self, label: str, done: int, total: int) -> None:
        super().progress(label, done, total)
        self.num_updates += label == "update"
        if self.num_updates == 2 and not self.killed:
            self.killed, handle = next(iter(self.system.generation.instances.items()))
            ray.kill(handle)


def trained(config: Config, folder: Path, *, kills: bool = False) -> tuple[list[dict], str, list[dict]]:
    """Rows of all samples, the checksum of what was learned, and the metrics."""
    run_dir = RunDir.create(config, folder)
    session = RaySession(
        namespace=f"test-{folder.parent.name}-{folder.name}", is_local=False, dashboard_url=None
    )
    with running_system(check_run(config, output_dir=Path.cwd()), session) as system:
        report = KillsBesideAnUpdate(system) if kills else Reporter()
        train(system, run_dir, report)
        checksum = system.target.manifest.checksum
        assert not kills or report.killed
    files = [run_dir.rollouts_file(number) for number in range(ITERATIONS)]
    rows = [{name: row[name] for name in SAME} for f in files for row in pq.read_table(f).to_pylist()]
    return rows, checksum, list(read_metrics(run_dir.metrics_file))


@pytest.fixture(scope="module")
def in_turns(local_ray, tiny_pair, tmp_path_factory):
    return trained(config_of(tiny_pair, "off", "none"), tmp_path_factory.mktemp("runs") / "off")


@pytest.mark.parametrize(("drafter", "kills"), [("none", False), ("model", True)])
def test_attempts_change_no_sample_and_no_weight(in_turns, tiny_pair, tmp_path, drafter: str, kills: bool):
    rows, checksum, _ = in_turns
    again, same, metrics = trained(
        config_of(tiny_pair, 3, drafter), tmp_path / f"ahead-{drafter}", kills=kills
    )
    assert len(rows) == len(again) == ITERATIONS * 12
    pairs = zip(rows, again, strict=True)
    assert [(a["sample_index"], name) for a, b in pairs for name in SAME if a[name] != b[name]] == []
    assert same == checksum
    assert sum(row["rollout/num_attempts"] for row in metrics) > 0
    assert all(row["rollout/num_attempt_drafts"] > 0 for row in metrics[1:])
    assert metrics[1]["rollout/attempts_proved"] > 0.5


def test_a_teacher_and_rewards_over_a_group_learn_the_same_under_attempts_and_a_kill(
    local_ray, tiny_pair, tmp_path
):
    """The student is the pair's smaller model; its teacher is told the answer."""
    sections = {
        "models": {"target": str(tiny_pair.draft), "teacher": str(tiny_pair.target)},
        "data": {"task": "chain", "limit": 64, "teacher_prompt_template": "{prompt}{answer}"},
        "reward": {"kind": "odd_rewards:against_the_others", "batch_size": 4},
        "algorithm": {"kind": "grpo", "distill_coef": 0.5},
    }
    rows, checksum, alone = trained(config_of(tiny_pair, "off", "none", **sections), tmp_path / "off")
    again, same, ahead = trained(config_of(tiny_pair, 3, "none", **sections), tmp_path / "ahead", kills=True)
    assert [{**row} for row in rows] == [{**row} for row in again] and same == checksum
    assert len({row["reward"] for row in rows}) > 1 and sum(row["rollout/num_attempts"] for row in ahead) > 0
    losses = [row["learner/distill_loss"] for row in alone]
    assert losses == [row["learner/distill_loss"] for row in ahead] and min(losses) > 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"max_staleness": 1}, "algorithm": {"correction": {"kind": "none"}}},
        {"algorithm": {"kind": "grpo", "dynamic_sampling": True}, "rollout": {"samples_per_prompt": 2}},
        {"environment": {"kind": "sample_environments:Parrot"}},
    ],
)
def test_what_is_not_known_beforehand_is_refused_in_one_line(changes):
    tree = {"models": {"target": "t", "draft": "d"}, "data": {"task": "chain"}, "reward": {"kind": "chain"}}
    tree |= {name: {**section} for name, section in changes.items()}
    tree["rollout"] = {**tree.get("rollout", {}), "look_ahead": "auto"}
    with pytest.raises(ConfigError, match=r"rollout.look_ahead takes whole responses") as refused:
        config_from_dict(tree)
    assert "\n" not in str(refused.value)
