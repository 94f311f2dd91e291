"""Places follow from the config; what cannot be placed is said with what is missing."""

import time
from dataclasses import replace

import pytest
import ray
import torch
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray.util.placement_group import remove_placement_group

from rlhfspec.actors.remote.assigned_device import resolve_device
from rlhfspec.cluster.plan.topology import (
    PlacementContext,
    actor_options,
    place,
    plan_topology,
    require_machine,
)
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, PlacementError


def config(**cluster) -> Config:
    models = {"target": "demo", "draft": "demo"}
    return config_from_dict({"models": models, "data": {"task": "chain"}, "cluster": cluster})


def test_the_defaults_fit_two_cpus_with_room_for_the_driver_of_a_job():
    wanted = plan_topology(config()).wanted()
    assert set(wanted) == {"CPU"} and wanted["CPU"] <= 1.9


def test_every_actor_has_a_bundle_of_its_own_and_holds_something():
    topology = plan_topology(config(generation={"num_actors": 3, "num_cpus": 0.0}, reward={"num_actors": 2}))
    assert [p.bundle for p in topology.places] == list(range(7))
    assert len({p.name for p in topology.places}) == 7
    assert all(p.resources()["CPU"] > 0 for p in topology.places)


def test_episodes_that_bring_their_own_rewards_need_no_reward_actor():
    made = config(reward={"num_actors": 2}, environment={"num_actors": 2}).model_dump()
    episodes = {"reward": {"kind": "environment"}, "environment": {"kind": "calculator"}}
    topology = plan_topology(config_from_dict(made | episodes))
    assert topology.reward == () and len(topology.environment) == 2
    assert [place.bundle for place in topology.places] == list(range(len(topology.places)))
    assert "reward" not in topology.describe()
    evaluated = replace(topology, trainer=()).places
    assert [place.bundle for place in evaluated] == list(range(len(evaluated)))


def test_gpus_and_threads_go_where_the_config_says():
    topology = plan_topology(config(trainer={"num_gpus": 1}, generation={"num_gpus": 0.5, "num_cpus": 1}))
    assert topology.wanted()["GPU"] == 2.0 and len(topology.generation) == 2
    assert topology.generation[0].resources() == {"CPU": 1.0, "GPU": 0.5}
    assert (topology.generation[0].num_threads, topology.trainer[0].num_threads) == (1, 2)


def test_an_actors_gpu_is_cudas_first_also_where_ray_is_told_to_hide_none(monkeypatch):
    topology = plan_topology(config(trainer={"num_gpus": 1}))
    context = PlacementContext(group=None, namespace="")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for name, value in actor_options(topology.trainer[0], context)["runtime_env"]["env_vars"].items():
        monkeypatch.setenv(name, value)
    # as Ray's worker does before it makes the actor
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = resolve_device("auto", assigned=("3",), key="trainer.device", pool="cluster.trainer")
    assert device == torch.device("cuda", 0)


def test_the_description_names_every_pool_and_the_total():
    text = plan_topology(config()).describe()
    assert "2 x 0.5 CPU" in text and "total" in text and "1.85 CPU" in text


def test_a_plan_too_large_for_one_machine_is_refused_before_the_start():
    require_machine(plan_topology(config()), num_cpus=2, num_gpus=0)
    with pytest.raises(PlacementError, match=r"the machine has 2 CPU and 0 GPU; missing: 6\.85 CPU"):
        require_machine(plan_topology(config(trainer={"num_cpus": 7.5})), num_cpus=2, num_gpus=0)
    with pytest.raises(PlacementError, match="missing: 2 GPU"):
        require_machine(plan_topology(config(generation={"num_gpus": 1})), num_cpus=2, num_gpus=0)
    fits = config(trainer={"num_gpus": 0.6}, generation={"num_actors": 4, "num_gpus": 0.2})
    require_machine(plan_topology(fits), num_cpus=None, num_gpus=2)
    gaps = config(trainer={"num_gpus": 0.6}, generation={"num_actors": 2, "num_gpus": 0.7})
    require_machine(plan_topology(gaps), num_cpus=None, num_gpus=3)
    with pytest.raises(PlacementError, match="leave gaps and take 3 whole ones, the machine has 2"):
        require_machine(plan_topology(gaps), num_cpus=None, num_gpus=2)
    with pytest.raises(PlacementError, match="STRICT_SPREAD wants 5 machines"):
        require_machine(plan_topology(config(placement="STRICT_SPREAD")), num_cpus=2, num_gpus=0)


def test_each_of_several_trainers_has_a_place_of_its_own():
    topology = plan_topology(config(trainer={"num_actors": 2, "num_cpus": 1.0}))
    assert [place.name for place in topology.trainer] == ["trainer-0", "trainer-1"]
    assert [place.bundle for place in topology.places] == list(range(len(topology.places)))
    assert "trainer    2 x 1 CPU" in topology.describe()


def test_pinned_pools_want_nodes_of_their_own_with_the_scheduler_beside_the_trainer():
    assert plan_topology(config()).label_selectors() is None
    topology = plan_topology(config(pin_pools=True, environment={"num_actors": 1}))
    wanted = [selector["rlhfspec-pool"] for selector in topology.label_selectors()]
    assert wanted == ["generation", "generation", "reward", "trainer", "trainer"]
    with pytest.raises(PlacementError, match="label rlhfspec-pool, which a private Ray has not"):
        require_machine(topology, num_cpus=2, num_gpus=0)


def test_several_trainers_that_could_not_learn_as_one_are_refused():
    with pytest.raises(ConfigError, match=r"num_actors is 33, but .*minibatch_size 32 responses"):
        plan_topology(config(trainer={"num_actors": 33}))
    with pytest.raises(
        ConfigError, match=r"trainer\.num_gpus is 1.5, and each actor uses one GPU; .*num_actors"
    ):
        plan_topology(config(trainer={"num_actors": 2, "num_gpus": 1.5}))


@pytest.mark.parametrize(
    ("pool", "section", "instead"),
    [("trainer", "trainer", "num_actors$"), ("generation", "engine", "num_actors or tensor_parallel$")],
)
def test_gpus_that_nobody_would_use_are_refused(pool: str, section: str, instead: str) -> None:
    made = config(**{pool: {"num_gpus": 8, "num_actors": 1}})
    with pytest.raises(
        ConfigError, match=rf"^cluster\.{pool}\.num_gpus is 8, .* set cluster\.{pool}\.{instead}"
    ):
        plan_topology(made)
    tree = made.model_dump() | {section: {"device": "cpu"}, "cluster": {pool: {"num_gpus": 0.5}}}
    with pytest.raises(
        ConfigError, match=rf"num_gpus is 0\.5 and {section}\.device is cpu.* set 0, or {section}"
    ):
        plan_topology(config_from_dict(tree))


def beside(num_trainers: int, share: float, **generation: float) -> tuple[list[int], list[int], list[float]]:
    """Bundles of instances, bundles of trainers, and each bundle's GPUs."""
    trainer = {"num_actors": num_trainers, "num_gpus": share, "num_cpus": 2}
    topology = plan_topology(config(trainer=trainer, generation={"num_cpus": 1} | generation))
    assert {place.bundle for place in topology.places} == set(range(len(topology.bundles)))
    assert sum(each["CPU"] for each in topology.bundles) == pytest.approx(
        sum(place.num_cpus for place in topology.places)
    )
    return (
        [place.bundle for place in topology.generation],
        [place.bundle for place in topology.trainer],
        [each.get("GPU", 0) for each in topology.bundles],
    )


def test_each_of_several_trainers_has_a_whole_gpu_in_a_bundle_with_the_instances_beside_it():
    # behind them a reward actor and the scheduler
    assert beside(3, 0.6, num_actors=3, num_gpus=0.4) == ([0, 1, 2], [0, 1, 2], [1, 1, 1, 0, 0])
    assert beside(2, 0.4, num_actors=4, num_gpus=0.3) == ([0, 1, 0, 1], [0, 1], [1, 1, 0, 0])
    fewer, more = beside(3, 0.6, num_actors=2, num_gpus=0.4), beside(2, 0.6, num_actors=3, num_gpus=0.4)
    assert fewer == ([0, 1], [0, 1, 4], [1, 1, 0, 0, 1]), "a trainer alone on its GPU"
    assert more == ([0, 1, 2], [0, 1], [1, 1, 0.4, 0, 0]), "an instance that no trainer has room for"
    assert beside(2, 0.7, num_actors=2, num_gpus=0.4)[:2] == ([0, 1], [4, 5]), "too large for the rest"
    assert beside(2, 0.7, num_actors=2, num_gpus=0)[2] == [0, 0, 0, 0, 1, 1]
    assert beside(2, 1, num_actors=2, num_gpus=1) == ([0, 1], [4, 5], [1, 1, 0, 0, 1, 1])
    assert beside(1, 0.6, num_actors=2, num_gpus=0.2) == ([0, 1], [4], [0.2, 0.2, 0, 0, 0.6]), "as ever"


def test_who_stands_beside_instances_keeps_its_place_where_they_find_new_ones():
    both = {"num_actors": 2, "num_gpus": 0.5}
    topology = plan_topology(config(trainer=both, generation=both))
    assert topology.fixed_bundles == {0, 1, 2, 3} and topology.wanted()["GPU"] == 2
    assert "beside     2 of the instances on the GPUs of trainers" in topology.describe()
    evaluated = replace(topology, trainer=())
    assert [each.get("GPU", 0) for each in evaluated.bundles] == [0.5, 0.5, 0, 0]
    pinned = plan_topology(config(trainer=both, generation=both, pin_pools=True))
    assert [place.bundle for place in pinned.trainer] == [4, 5], "nodes of their own"
    assert len(pinned.label_selectors()) == len(pinned.bundles) == 6


@pytest.mark.ray
def test_a_placement_error_names_the_missing_resources(local_ray):
    topology = plan_topology(config(generation={"num_actors": 6, "num_gpus": 1}, placement_timeout_s=0.5))
    with pytest.raises(PlacementError, match=r"missing: (.* and )?6 GPU") as at_once:
        place(topology, is_local=True)
    with pytest.raises(PlacementError, match=r"missing: (.* and )?6 GPU") as after_waiting:
        place(topology, is_local=False)
    notes: list[str] = []
    with pytest.raises(PlacementError, match=r"missing: (.* and )?6 GPU"):
        place(topology, is_local=False, patience_s=0.5, note=notes.append)
    assert len(notes) == 1 and "6 GPU" in notes[0] and notes[0].endswith("; waiting 0 s more")
    assert "waited 0 s" in str(at_once.value) and "cluster has 4 CPU and 0 GPU" in str(after_waiting.value)


@pytest.mark.ray
def test_pools_that_no_node_is_for_are_named(local_ray):
    with pytest.raises(
        PlacementError, match="no node has the label rlhfspec-pool for generation, reward, trainer"
    ):
        place(plan_topology(config(pin_pools=True, placement_timeout_s=0.5)), is_local=False)


@pytest.mark.ray
def test_an_actor_stands_in_its_bundle_with_its_threads_and_leaves_with_the_group(local_ray):
    @ray.remote
    class Probe:
        def threads(self) -> str | None:
            import os

            return os.environ.get("OMP_NUM_THREADS")

    topology = plan_topology(config())
    group = place(topology, is_local=True)
    context = PlacementContext(group=group, namespace="test-topology")
    actor = Probe.options(**actor_options(topology.trainer[0], context)).remote()
    assert ray.get(actor.threads.remote(), timeout=60) == "2"
    remove_placement_group(group)
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0.0) < 4.0:
        assert time.monotonic() < deadline, "the bundles were not given back"
        time.sleep(0.1)
