"""Instances of two ranks in a run: the weights of a run with single ones, a rank that is killed included."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from loop_hooks import before_updates
from ray.exceptions import RayActorError

from rlhfspec.actors.actor_messages import GenerationSpec
from rlhfspec.actors.generation import rank_actors
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.plan.topology import plan_topology
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.system.system import System, running_system
from rlhfspec.core.config import Config, EngineConfig, SpeculationConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, PlacementError


def namespace_of(num_ranks: int) -> str:
    return f"test-groups-of-{num_ranks}"


def config_of(num_ranks: int, models: dict[str, Any] | None = None, **sections: Any) -> Config:
    generation = {"num_actors": 2, "num_cpus": 0.25, "tensor_parallel": num_ranks}
    return config_from_dict(
        {
            "run": {"iterations": 2, "seed": 5},
            "models": models or {"target": "demo", "draft": "demo"},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "sample_rewards:vowel_share"},
            "sampling": {"max_new_tokens": 40},
            "speculation": {"policy": "fixed", "num_nodes": 6, "depth": 3, "branching": 2},
            "rollout": {"prompts_per_iteration": 4, "samples_per_prompt": 3},
            "engine": {"max_running_samples": 4},
            "algorithm": {"kind": "grpo"},
            "trainer": {"minibatch_size": 6, "learning_rate": 1e-2, "num_threads": 1},
            "cluster": {"generation": generation},
        }
        | sections
    )


def published(tmp_path: Path, pair: Any, num_ranks: int, note: Callable[[str], None] = print) -> list[str]:
    """Checksums of the weight versions of a run."""
    models = {"target": str(pair.target), "draft": str(pair.draft)}
    config = config_of(num_ranks, models)
    run_dir = RunDir.create(config, tmp_path / f"ranks_{num_ranks}")
    session = RaySession(namespace=namespace_of(num_ranks), is_local=False, dashboard_url=None)
    with running_system(check_run(config, output_dir=tmp_path), session, note=note) as system:
        train(system, run_dir, Reporter())
    log = (run_dir.path / "weights.jsonl").read_text().splitlines()
    return [row["parameter_checksum"] for row in map(json.loads, log) if row["model"] == "target"]


@pytest.mark.ray
@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_though_one_is_killed(
    local_ray: None, tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, killed, notes = published(tmp_path, tiny_pair, 1), list[str](), list[str]()

    def kill_a_rank(system: System) -> None:
        if not killed:
            killed.append("gen-0-rank-1")
            leader, rank = (ray.get_actor(name, namespace=namespace_of(2)) for name in ("gen-0", killed[0]))
            ray.kill(rank)
            # it has no samples, and ends all the same
            ends_s = time.monotonic() + 120.0
            with pytest.raises(RayActorError):
                while time.monotonic() < ends_s:
                    ray.get(leader.numerics.remote(), timeout=120.0)
            while time.monotonic() < ends_s and not any("was lost" in line for line in notes):
                system.take(0.2, notes.append)

    before_updates(monkeypatch, kill_a_rank)
    assert len(alone) == 3
    assert published(tmp_path, tiny_pair, 2, notes.append) == alone
    (lost,) = [line for line in notes if "was lost" in line]
    assert killed and lost.startswith("instance gen-0 was lost (rank 1 of 2 has ended: "), (
        "who ended, not who heard"
    )


def test_a_group_has_one_bundle_with_room_for_all_its_ranks() -> None:
    topology = plan_topology(config_of(4))
    (first, second) = topology.generation
    assert first.resources() == second.resources() == {"CPU": 1.0}
    assert "2 x 1 CPU, 1 thread(s) in each of 4 ranks (tensor_parallel)" in topology.describe()


def test_ranks_on_gpus_have_one_each_of_one_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = {"num_actors": 1, "num_cpus": 0.5, "num_gpus": 1, "tensor_parallel": 4}
    (instance,) = plan_topology(config_of(4, cluster={"generation": generation})).generation
    assert instance.resources() == {"CPU": 2.0, "GPU": 4.0}
    spec = GenerationSpec(
        instance="gen-0",
        engine=EngineConfig(),
        speculation=SpeculationConfig(drafter="none"),
        dtype="bfloat16",
        max_total_tokens=64,
        vocab_size=300,
        report_interval_s=1.0,
        gpu_share=1.0,
        num_ranks=4,
        rank_cpus=0.5,
    )
    asked: list[dict[str, Any]] = []

    class Actor:
        @staticmethod
        def options(**options: Any) -> Any:
            asked.append(options)
            return SimpleNamespace(remote=lambda *named: named)

    monkeypatch.setattr(rank_actors, "RankActor", Actor)
    monkeypatch.setattr(rank_actors, "ray", SimpleNamespace(util=ray_util_without_group()))
    for assigned in ((), ("3",)):
        monkeypatch.setattr(rank_actors, "assigned_gpus", lambda gpus=assigned: gpus)
        assert rank_actors._started(spec, 2) == (spec, 2)
    assert [(one["num_cpus"], one["num_gpus"]) for one in asked] == [(0.5, 0.0), (0.5, 1.0)]


def test_a_rank_asks_its_own_gpu_for_what_the_leader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, torch.device, int, float]] = []

    def refuse(who: str, device: torch.device, *, needed_bytes: int, share: float, advice: str) -> int:
        asked.append((who, device, needed_bytes, share))
        raise PlacementError(f"{who} plans to take more than there is; {advice}")

    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(rank_actors, "resolve_device", lambda *_, **__: gpu)
    monkeypatch.setattr(rank_actors, "take_gpu_share", refuse)
    spec: Any = SimpleNamespace(
        instance="gen-0", num_ranks=2, gpu_bytes=5 << 30, gpu_share=1.0, engine=EngineConfig()
    )
    with pytest.raises(PlacementError, match="gen-0-rank-1 plans to take more"):
        rank_actors._join("nowhere", 1, spec)
    assert asked == [("gen-0-rank-1", gpu, 5 << 30, 1.0)]


def ray_util_without_group() -> Any:
    return SimpleNamespace(get_current_placement_group=lambda: None)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"engine": {"num_threads": 2}}, "engine.num_threads=2, expected 1"),
        ({"engine": {"attention": "sdpa", "numerics": "fast"}}, "engine.attention=sdpa, expected auto"),
        ({"engine": {"forward": "stock"}}, "engine.forward=stock, expected auto"),
        ({"speculation": {"drafter": "mtp"}}, "speculation.drafter=mtp"),
        ({"cluster": {"generation": {"tensor_parallel": 2, "num_gpus": 2}}}, "num_gpus=2, expected 0 or 1"),
        (
            {"cluster": {"generation": {"tensor_parallel": 2, "num_gpus": 1}}, "engine": {"device": "cpu"}},
            "engine.device=cpu, expected auto or cuda",
        ),
        (
            {
                "cluster": {"generation": {"tensor_parallel": 2, "num_gpus": 1}},
                "engine": {"numerics": "invariant"},
            },
            "engine.numerics=invariant on GPUs",
        ),
        (
            {
                "cluster": {"generation": {"tensor_parallel": 2, "num_gpus": 1}},
                "speculation": {"policy": "goodput"},
            },
            "speculation.policy=goodput on GPUs",
        ),
    ],
)
def test_what_a_group_does_not_do_yet_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel=2 does not go with .*{said}"):
        plan_topology(config_of(2, **sections))
