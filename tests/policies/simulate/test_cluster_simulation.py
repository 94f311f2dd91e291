"""A whole simulated run on a small cluster; sweeps; settings that contradict each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.simulate.cluster_simulation import bound, simulate_cluster
from rlhfspec.policies.simulate.described_cluster import MODELLED, SOURCES, assumptions, describe


def config(**sections: dict[str, Any]) -> SimulatedClusterConfig:
    small = {
        "pools": {"instances": 2, "trainer_gpus": 2},
        "lengths": {"samples": 16, "prompt_tokens": 16, "max_new_tokens": 256},
        "step": {"steps": 1},
    }
    for name, keys in sections.items():
        small[name] = small.get(name, {}) | keys
    return SimulatedClusterConfig.model_validate(small)


def test_equal_samples_take_as_long_as_their_steps() -> None:
    """No tails, no moves, no spread: the rollout is its decode steps, one after the other."""
    alike = config(
        lengths={"draw": "equal", "speed_sigma": 0.0, "prompt_tokens": 0},
        drafter={"kind": "none"},
        reallocation={"policy": "static"},
    )
    cluster = describe(alike)
    made = simulate_cluster(cluster)
    steps = [cluster.instance.plain_s(8, 8 * (done + 0.5)) for done in range(256)]
    assert made.plain.rollout_s == pytest.approx(sum(steps), rel=0.01)
    assert made.speculative == made.plain
    rest_s = made.training.total_s + made.publication_s + made.other_s
    assert made.plain.step_s == pytest.approx(made.plain.rollout_s + rest_s)
    assert made.rollout_share == pytest.approx(made.plain.rollout_s / made.plain.step_s)
    assert made.plain.trainer_idle == pytest.approx(made.rollout_share)
    assert made.plain.instances_idle == pytest.approx(1.0 - made.rollout_share, rel=0.02)


def test_in_turns_the_step_gains_what_the_bound_allows() -> None:
    made = simulate_cluster(describe(config(step={"steps": 2})))
    assert made.rollout_speedup > 1.2
    assert made.step_speedup == pytest.approx(made.step_bound, rel=0.02)


def test_staleness_overlaps() -> None:
    turns = simulate_cluster(describe(config()))
    ahead = simulate_cluster(describe(config(step={"staleness": 1})))
    # what comes after the update waits for the phase beside it
    after_s = turns.publication_s + turns.other_s
    longer_s = max(turns.speculative.rollout_s, turns.training.total_s)
    assert ahead.speculative.step_s == pytest.approx(longer_s + after_s)
    assert min(ahead.speculative.trainer_idle, ahead.plain.trainer_idle) < turns.speculative.trainer_idle


def test_a_fixed_tree_counts_its_nodes() -> None:
    tree = {"policy": "fixed", "nodes": 8, "depth": 4, "width": 4, "acceptance_length": 3.0}
    cluster = describe(config(drafter=tree))
    draft = cluster.instance.draft
    assert draft is not None and (draft.nodes, draft.levels, draft.width, draft.tokens) == (8, 4, 4, 3.0)
    assert simulate_cluster(cluster).levels[0] == (1, 4)


def test_recorded_lengths_are_drawn_from() -> None:
    cluster = describe(config(), np.array([5, 7]))
    assert set(cluster.samples(0).response_tokens.tolist()) == {5, 7}
    assert cluster.samples(0).response_tokens.tolist() != cluster.samples(1).response_tokens.tolist()


def test_measured_seconds_replace_modelled_ones() -> None:
    made = simulate_cluster(
        describe(config(learner={"measured_s": 3.0}, step={"publication_s": 0.5, "other_s": 0.0}))
    )
    assert made.training.total_s == 3.0 and made.publication_s == 0.5
    assert made.plain.step_s == pytest.approx(made.plain.rollout_s + 3.5)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"drafter": {"depth": 2, "acceptance_length": 3.5}}, "more than depth"),
        ({"drafter": {"nodes": 2, "depth": 3, "policy": "fixed"}}, "fewer than depth"),
        ({"drafter": {"nodes": 4}}, "policy fixed"),
        ({"drafter": {"kind": "model"}}, "needs config"),
        ({"model": {"config": "x", "dimensions": {}}}, "give one of them"),
        ({"pools": {"colocated": True}, "step": {"staleness": 1}}, "take turns"),
        ({"step": {"staleness": 1, "look_ahead": "auto"}}, "set step.staleness to 0"),
        ({"pools": {"colocated": True, "trainer_gpus": 3}}, "must be instances x tensor_parallel = 2"),
        ({"device": {"name": "H900"}}, "H100"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**sections)


def test_experts_are_split_only_where_there_are_some() -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        describe(config(pools={"split": "expert"}))


def test_every_assumption_is_in_the_table() -> None:
    rows = assumptions(describe(config(learner={"mfu": 0.3})))
    assert [row.name for row in rows][2:] == [*SOURCES, *(name for name, _, _ in MODELLED)]
    assert all(row.value and row.source for row in rows)
    told = {row.name: row.source for row in rows}
    assert told["learner.mfu"] == "the config" and "2511.16665" in told["device.memory_share"]
    without = assumptions(describe(config(drafter={"kind": "none"})))
    assert not any(row.name.startswith("drafter.") for row in without)


def test_the_bound() -> None:
    assert bound(0.5, 2.0) == pytest.approx(4 / 3)
    assert bound(1.0, 3.0) == pytest.approx(3.0)
    assert bound(0.0, 3.0) == pytest.approx(1.0)
    # NeMo-RL's RL-Zero: 100.0 of 151.2 s, 1.77 times as fast
    assert bound(100.0 / 151.2, 1.77) == pytest.approx(1.40, abs=0.01)
