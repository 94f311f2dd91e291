"""Trainers compute during a rollout where they take nothing from the instances, and the reason is said."""

import pytest
from ray.util.placement_group import remove_placement_group

from rlhfspec.cluster.placement.spare_cores import nodes_of, streams_forwards
from rlhfspec.cluster.placement.topology import place, plan
from rlhfspec.core.config_io import config_from_dict


def decided(cores: float | dict[int, tuple[str, float]], *, recomputes_old: bool = False, **sections):
    """Two instances of one thread and a trainer of two, on one machine of so many cores."""
    base = {"data": {"task": "chain"}, "models": {"draft": "demo"}}
    config = config_from_dict(base | sections)
    topology = plan(config)
    where = cores if isinstance(cores, dict) else {place.bundle: ("", cores) for place in topology.places}
    return streams_forwards(config, topology, where, recomputes_old=recomputes_old)


def test_auto_is_on_where_there_are_cores_for_all_threads():
    assert decided(4) == (True, "forwards before the update are computed while the rollout's tail runs")
    on, why = decided(3)
    assert not on
    assert "trainer shares 3 cores with instances, all together use 4 threads" in why
    assert decided(3, trainer={"num_threads": 1})[0]
    assert not decided(4, reward={"kind": "model", "model": "demo"})[0], "a reward model computes too"


def test_a_trainer_on_a_node_of_its_own_takes_nothing_away():
    # bundles: two instances, a reward actor, the scheduler, the trainer
    apart = dict.fromkeys(range(4), ("a", 2.0)) | {4: ("b", 2.0)}
    assert decided(apart)[0]
    on, why = decided(dict.fromkeys(range(5), ("0123456789", 2.0)))
    assert not on and "2 cores of node 01234567" in why


def test_a_gpu_of_its_own_is_enough_and_a_shared_one_is_not():
    fixed = {"policy": "fixed"}
    generation = {"num_gpus": 0.5}
    both = {"trainer": {"num_gpus": 1}, "generation": generation}
    assert decided(1, cluster=both, speculation=fixed)[0]
    on, why = decided(64, cluster=both | {"trainer": {"num_gpus": 0.5}}, speculation=fixed)
    assert not on and "may share a GPU (cluster.trainer.num_gpus 0.5)" in why


def test_the_user_s_word_counts_and_the_price_is_said():
    assert decided(64, trainer={"stream_forwards": "off"}) == (False, "")
    on, why = decided(2, trainer={"stream_forwards": "on"})
    assert on and "and slow it down: trainer shares 2 cores" in why


@pytest.mark.parametrize("recomputes_old", [False, True])
def test_where_nothing_is_computed_before_the_first_step_nothing_is_streamed(recomputes_old):
    sections = {
        "algorithm": {"kind": "grpo", "kl_coef": 0.0},
        "rollout": {"samples_per_prompt": 2},
    }
    assert decided(64, recomputes_old=recomputes_old, **sections)[0] == recomputes_old
    on, why = decided(64, trainer={"stream_forwards": "on"}, **sections)
    assert not on and "there is nothing to stream" in why


@pytest.mark.ray
def test_every_bundle_has_a_node_and_cores(local_ray):
    topology = plan(config_from_dict({"data": {"task": "chain"}, "models": {"draft": "demo"}}))
    group = place(topology, is_local=True)
    try:
        found = nodes_of(group, topology)
    finally:
        remove_placement_group(group)
    assert found.keys() == {place.bundle for place in topology.places}
    assert all(cores >= 1.0 for _, cores in found.values())
