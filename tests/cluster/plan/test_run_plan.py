"""What updates take away from instances beside them is said: cores of one node, or a GPU."""

from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import remove_placement_group

from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.plan.run_plan import RunPlan
from rlhfspec.cluster.plan.topology import place, plan_topology
from rlhfspec.cluster.system.placement_slots import cores_of
from rlhfspec.core.config_io import config_from_dict, dump_config, load_config
from tests.conftest import TinyPair


def shared(cores: float | dict[int, tuple[str, float]], **sections) -> str:
    """By two instances of one thread and a trainer of two, on one machine of so many cores."""
    base = {"data": {"task": "chain"}, "models": {"draft": "demo"}}
    config = config_from_dict(base | sections)
    topology = plan_topology(config)
    where = cores if isinstance(cores, dict) else {place.bundle: ("", cores) for place in topology.places}
    nothing: Any = None
    plan = RunPlan(config=config, topology=topology, models=nothing, inputs=nothing, memory=nothing)
    return plan.shared_by_updates(where)


def test_nothing_is_shared_where_there_are_cores_for_all_threads():
    assert not shared(4)
    assert "trainer shares 3 cores with instances, all together use 4 threads" in shared(3)
    assert not shared(3, trainer={"num_threads": 1})
    assert shared(4, reward={"kind": "model", "model": "demo"}), "a reward model computes too"


def test_a_trainer_on_a_node_of_its_own_takes_nothing_away():
    # bundles: two instances, a reward actor, the scheduler, the trainer
    assert not shared(dict.fromkeys(range(4), ("a", 2.0)) | {4: ("b", 2.0)})
    assert "2 cores of node 01234567" in shared(dict.fromkeys(range(5), ("0123456789", 2.0)))


def test_a_gpu_of_its_own_is_enough_and_a_shared_one_is_not():
    fixed = {"policy": "fixed"}
    both = {"trainer": {"num_gpus": 1}, "generation": {"num_gpus": 0.5}}
    assert not shared(1, cluster=both, speculation=fixed)
    why = shared(64, cluster=both | {"trainer": {"num_gpus": 0.5}}, speculation=fixed)
    assert "may share a GPU (cluster.trainer.num_gpus 0.5)" in why


@pytest.mark.ray
def test_every_bundle_has_a_node_and_cores(local_ray):
    topology = plan_topology(config_from_dict({"data": {"task": "chain"}, "models": {"draft": "demo"}}))
    group = place(topology, is_local=True)
    try:
        found = cores_of(group, topology)
    finally:
        remove_placement_group(group)
    assert found.keys() == {place.bundle for place in topology.places}
    assert all(cores >= 1.0 for _, cores in found.values())


@pytest.mark.parametrize(
    "free_mb, said",
    [
        (4000, None),
        (200, "the object store has 0.18 GiB of the 0.25 GiB"),
        (64, "the object store has 0.10 GiB of"),
    ],
)
def test_a_store_that_spills_is_told_by_check_and_at_the_start(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mb: int, said: str | None
):
    monkeypatch.setattr("rlhfspec.cluster.ray_start.machine.shared_memory_bytes", lambda: free_mb << 20)
    monkeypatch.setattr("rlhfspec.cluster.plan.run_check.is_local", lambda address: address is None)
    for address, expected in ((None, said), ("auto", None)):
        tree = tree_of(tiny_pair) | {"cluster": {"address": address}}
        plan = check_run(config_from_dict(tree), output_dir=tmp_path)
        for lines in (plan.notes, plan.report):
            found = [line for line in lines if "the object store has" in line]
            assert len(found) == (expected is not None) and all(expected in line for line in found)


def tree_of(pair: TinyPair) -> dict[str, Any]:
    return {
        "run": {"epochs": 2.5},
        "data": {"task": "chain", "limit": 10},
        "models": {"target": str(pair.target), "draft": str(pair.draft)},
        "sampling": {"max_new_tokens": 8},
        "rollout": {"prompts_per_iteration": 4},
        "trainer": {"minibatch_size": 4, "warmup_ratio": 0.1, "num_threads": 1},
        "engine": {"num_threads": 1},
    }


def test_epochs_are_counted_in_prompts_and_kept_as_iterations(tiny_pair: TinyPair, tmp_path: Path):
    plan = check_run(config_from_dict(tree_of(tiny_pair)), output_dir=tmp_path)
    # twenty-five prompts, four at a time
    assert (plan.config.run.iterations, plan.config.run.epochs) == (7, None)
    assert any("run.epochs 2.5 is 7 iterations" in line for line in plan.report)
    dump_config(plan.config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == plan.config
    assert plan.trainer_spec().num_optimizer_steps == 7 * plan.config.rollout.samples_per_prompt
