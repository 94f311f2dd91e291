"""`rlhfspec serve engine` before Ray: one set of overrides, a plan of memory, a refusal in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.jobs import engine_server
from rlhfspec.cluster.jobs.engine_server import plan_server, serve_engine
from rlhfspec.cluster.jobs.ray_serve import ServerAddress
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan import run_check
from rlhfspec.cluster.plan.memory_plan import RAY_PROCESSES_BYTES, TORCH_PROCESS_BYTES
from rlhfspec.cluster.plan.run_plan import RunPlan
from rlhfspec.cluster.ray_start import forked_workers, machine
from rlhfspec.core.errors import ConfigError, PlacementError
from tests.conftest import TinyPair


@pytest.fixture
def plan(tiny_pair: TinyPair) -> RunPlan:
    tree = {"cluster": {"generation": {"num_actors": 3}, "object_store_bytes": 1 << 27}}
    return plan_server(tree, Reporter(), model=str(tiny_pair.target))


def test_a_server_s_plan_holds_instances_ray_and_the_replica_and_no_trainer(plan: RunPlan) -> None:
    memory = plan.memory
    assert memory is not None and plan.config.engine.kv_cache_mb == 640
    beside = RAY_PROCESSES_BYTES + 2 * TORCH_PROCESS_BYTES
    assert memory.total_bytes == 3 * memory.generation_bytes + (1 << 27) + beside
    assert [label for label, _ in memory.rows()] == ["generation", "object store", "ray and driver", "total"]
    assert plan.generation_spec("gen-0").gpu_bytes == 0


def test_a_model_without_room_is_refused_before_ray_starts(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr(engine_server, "serve_application", lambda *_, **options: served.append(options))
    said = {"served_name": "tiny", "drain_s": 1.0, "note": print}
    assert plan.memory is not None
    monkeypatch.setattr(machine, "memory_bytes", lambda: plan.memory.total_bytes - 1)
    refused = r"^the server needs .* \(generation 3 x .*\); lower engine.max_running_samples, engine.kv_cache_mb, --c"
    with pytest.raises(PlacementError, match=refused):
        serve_engine(plan, ServerAddress(port=0), None, **said)
    big = replace(plan.memory, gpu_bytes=80 << 30, gpu_parts={"weights and logits": 80 << 30})
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1 << 60)
    monkeypatch.setattr(run_check, "is_local", lambda address: True)
    monkeypatch.setattr(machine, "gpus", lambda: machine.Gpus(1, 79 << 30))
    with pytest.raises(PlacementError, match=r"an instance needs .* of a GPU's memory"):
        serve_engine(replace(plan, memory=big), ServerAddress(port=0), None, **said)
    assert not served
    serve_engine(plan, ServerAddress(port=0), None, **said)
    assert served[0]["store_bytes"] == 1 << 27


@pytest.mark.parametrize("key", ["data.path=x", "reward.kind=chain", "models.target=x"])
def test_a_key_that_a_server_does_not_read_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "engine", "--model", "DIR", "--set", key]) == 2
    assert f"--set {key} has no effect on a server of --model DIR" in capsys.readouterr().err


def test_what_drafts_may_be_set_without_a_config(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[RunPlan] = []
    monkeypatch.setattr(forked_workers, "begin_workers", lambda said: None)
    monkeypatch.setattr(engine_server, "serve_engine", lambda plan, *_, **__: plans.append(plan))
    words = ["serve", "engine", "--model", str(tiny_pair.target), "--set", f"models.draft={tiny_pair.draft}"]
    assert main([*words, "--set", "cluster.generation.num_actors=1"]) == 0
    config = plans[0].config
    assert (config.speculation.drafter, config.speculation.policy) == ("model", "fixed")
    assert config.cluster.generation.num_actors == 1


def test_a_section_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="the server: cluster must be a section, got"):
        plan_server({"cluster": 5}, Reporter(), model="DIR")
