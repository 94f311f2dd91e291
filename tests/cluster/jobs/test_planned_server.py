"""`rlhfspec serve engine` before Ray: one set of overrides, a plan of memory, a refusal in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.jobs import engine_server
from rlhfspec.cluster.jobs.engine_server import plan_server, serve_engine
from rlhfspec.cluster.jobs.evaluate_models import untrained_config
from rlhfspec.cluster.jobs.ray_serve import ServerAddress
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan import run_check
from rlhfspec.cluster.plan.memory_plan import RAY_PROCESSES_BYTES, TORCH_PROCESS_BYTES
from rlhfspec.cluster.plan.run_plan import RunPlan
from rlhfspec.cluster.ray_start import forked_workers, machine
from rlhfspec.core.errors import ConfigError, PlacementError
from rlhfspec.integrations.engine_in_process import Engine
from tests.conftest import TinyPair


@pytest.fixture
def plan(tiny_pair: TinyPair) -> RunPlan:
    tree = {"cluster": {"generation": {"num_actors": 3}, "object_store_bytes": 1 << 27}}
    return plan_server(tree, Reporter(), model=str(tiny_pair.target))


def test_a_server_s_plan_holds_instances_ray_and_the_replica_and_no_trainer(plan: RunPlan) -> None:
    memory = plan.memory
    assert plan.config.engine.kv_cache_mb == 640
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


@pytest.mark.parametrize(
    "key", ["data.path=x", "reward.kind=chain", "models.target=x", "sampling.temperature=0.5", "run.seed=3"]
)
def test_a_key_that_a_server_does_not_read_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "engine", "--model", "DIR", "--set", key]) == 2
    name = key.partition("=")[0]
    assert f"{name} has no effect on the server, which reads speculation, engine, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["policy=fixed"], "speculation.drafter is 'model' but models.draft is null; name a draft model"),
        (["num_nodes=4"], "speculation.drafter is 'model' but models.draft is null"),
        (["drafter=head"], "speculation.drafter is 'head' but models.draft is null"),
        (["drafter=none", "policy=bandit"], "speculation.policy has no effect: drafter is none"),
        (
            ["drafter=suffix", "num_nodes=4", "policy=bandit"],
            "num_nodes has no effect: nothing drafts by policy",
        ),
        (["drafter=suffix", "policy=goodput"], "speculation.policy goodput goes by a profile of one target"),
        (["drafter=suffix", "profile=x"], "speculation.profile has no effect: the policy goes by no profile"),
    ],
)
@pytest.mark.parametrize("by", ["the server", "the evaluation"])
def test_what_is_said_of_drafts_without_a_draft_is_refused(words: list[str], said: str, by: str) -> None:
    overrides = [f"speculation.{word}" for word in words]
    with pytest.raises(ConfigError, match=said):
        untrained_config({"data": {"task": "chain"}}, model="m", overrides=overrides, by=by)


def test_a_file_that_says_how_much_is_drafted_and_names_no_draft_is_refused() -> None:
    tree = {"data": {"task": "chain"}, "speculation": {"policy": "fixed", "num_nodes": 4}}
    with pytest.raises(ConfigError, match=r"models\.draft is null"):
        untrained_config(tree, model="m", overrides=[], by="the server")


@pytest.mark.parametrize("overrides", [[], ["speculation.policy=off"], ["speculation.drafter=none"]])
def test_who_says_nothing_of_drafts_or_wants_none_decodes_plainly(overrides: list[str]) -> None:
    config = untrained_config({"data": {"task": "chain"}}, model="m", overrides=overrides, by="the server")
    assert not config.speculation.drafts and config.models.draft is None


def test_an_engine_in_this_process_refuses_what_it_does_not_read(tiny_pair: TinyPair) -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.generation\.num_actors has no effect on rlhfspec\.Engine"
    ):
        Engine(tiny_pair.target, args={"cluster.generation.num_actors": 4})
    with pytest.raises(ConfigError, match=r"models\.draft is null"):
        Engine(tiny_pair.target, args={"speculation.policy": "fixed"})


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
