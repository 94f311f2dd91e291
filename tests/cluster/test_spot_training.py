"""A run whose idle instances train the draft head makes the tokens of one where none does, whoever dies meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
from loop_hooks import before_updates

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.system.system import System, running_system
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.metrics import read_metrics
from rlhfspec.engine.drafters.head.head_weights import load_head, save_head
from rlhfspec.engine.weights.loading import load_causal_lm
from tests.conftest import TinyPair
from tests.helpers.random_heads import random_head

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]
LIMIT_S = 300.0
ITERATIONS = 3
BITS = ["response_token_ids", "policy_logprobs", "sampling_logprobs"]


@pytest.fixture(scope="module")
def head(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "head"
    target: Any = load_causal_lm(str(tiny_pair.target), "float32")
    save_head(folder, random_head(target))
    return folder


def config_of(pair: TinyPair, head: Path, *, spot: str) -> Config:
    return config_from_dict(
        {
            "run": {"iterations": ITERATIONS, "seed": 5},
            "models": {"target": str(pair.target), "draft": str(head)},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "sample_rewards:vowel_share", "batch_size": 4},
            "sampling": {"max_new_tokens": 48},
            "speculation": {
                "drafter": "head",
                "policy": "fixed",
                "num_nodes": 6,
                "depth": 3,
                "branching": 2,
            },
            "rollout": {"prompts_per_iteration": 24},
            "engine": {"max_running_samples": 4},
            "cluster": {"generation": {"num_actors": 2, "num_cpus": 0.5}},
            "trainer": {"minibatch_size": 6, "learning_rate": 1e-3, "num_threads": 1},
            # as many passes as there is time for: who is idle is training
            "drafter_training": {
                "spot": spot,
                "budget_share": 1.0,
                "max_passes": 10**6,
                "head_learning_rate": 3e-3,
            },
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run that has ended."""

    run_dir: RunDir
    notes: list[str]
    checksum: str
    draft_version: int

    def rollouts(self) -> list[dict[str, list]]:
        """What was sampled, by iteration."""
        tables = (pq.read_table(self.run_dir.rollouts_file(i)) for i in range(ITERATIONS))
        return [table.sort_by("sample_index").select(["sample_index", *BITS]).to_pydict() for table in tables]

    def metrics(self, name: str) -> list[float]:
        """Of every iteration."""
        return [row[name] for row in read_metrics(self.run_dir.metrics_file)]


@pytest.fixture(scope="module")
def run(
    local_ray: None, tiny_pair: TinyPair, head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ran]:
    def go(spot: str) -> Ran:
        config = config_of(tiny_pair, head, spot=spot)
        run_dir = RunDir.create(config, tmp_path_factory.mktemp("spot") / "run")
        session = RaySession(namespace=f"test-{run_dir.path.parent.name}", is_local=False, dashboard_url=None)
        notes: list[str] = []
        with running_system(check_run(config, output_dir=Path.cwd()), session, note=notes.append) as system:
            train(system, run_dir, Reporter())
            assert system.draft is not None
            return Ran(
                run_dir=run_dir,
                notes=notes,
                checksum=system.target.manifest.checksum,
                draft_version=system.draft.manifest.weight_version,
            )

    return go


@pytest.fixture(scope="module")
def frozen(run: Callable[..., Ran]) -> Ran:
    return run("off")


def same(one: Ran, other: Ran) -> None:
    assert one.rollouts() == other.rollouts()
    assert one.checksum == other.checksum


def test_idle_instances_train_the_head_and_no_token_is_another(
    run: Callable[..., Ran], frozen: Ran, head: Path
) -> None:
    trained = run("on")
    same(trained, frozen)
    assert frozen.draft_version == 0 and trained.draft_version >= 1
    assert sum(trained.metrics("draft/spot_steps")) > 0 and sum(trained.metrics("draft/spot_s")) > 0.0
    assert trained.metrics("draft/weight_version")[-1] == trained.draft_version
    # compared on what was held out, and only taken where it is no worse
    rows = read_metrics(trained.run_dir.metrics_file)
    taken = [row for row in rows if row["draft/refit_taken"] and "draft/kl_after" in row]
    assert all(row["draft/kl_after"] <= row["draft/kl_before"] for row in taken)
    saved = load_head(trained.run_dir.checkpoint_dir("draft"), num_target_layers=2)
    first = load_head(head, num_target_layers=2)
    assert saved.config == first.config and not saved.tensors["fc.weight"].equal(first.tensors["fc.weight"])


def test_an_instance_that_is_killed_while_it_trains_is_replaced_and_no_token_is_another(
    run: Callable[..., Ran], frozen: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = []

    def strike(system: System) -> None:
        if system.target.manifest.weight_version == 1 and not killed:
            killed.append(kill_a_training_one(system))

    before_updates(monkeypatch, strike)
    survived = run("on")
    assert killed and any(killed[0] in note for note in survived.notes)
    same(survived, frozen)
    assert survived.draft_version >= 1, "what the other learned stands"


def kill_a_training_one(system: System) -> str:
    """Wait until the scheduler's table says that somebody trains, and kill it there."""
    ends_s = time.monotonic() + LIMIT_S
    while time.monotonic() < ends_s:
        seen = ray.get(system.scheduler.handle.views.remote(), timeout=LIMIT_S)
        for view in seen:
            if view.activity == "training":
                ray.kill(system.generation.instances[view.instance])
                return view.instance
        time.sleep(0.05)
    raise AssertionError(f"nobody trained within {LIMIT_S:.0f} s")
