"""A simulated run that looks ahead: what it saves by hand, and that without attempts it is the run that it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.scheduling.look_ahead import LookAheadLaw
from rlhfspec.policies.simulate.cluster_simulation import ClusterResult, simulate_cluster
from rlhfspec.policies.simulate.described_cluster import DescribedCluster, describe

MOVING: dict[str, dict[str, Any]] = {
    "pools": {"instances": 3, "trainer_gpus": 2},
    "lengths": {"samples": 48, "draw": "skewed", "prompt_tokens": 9000, "max_new_tokens": 1024},
    "learner": {"measured_s": 1.0},
    "reallocation": {"policy": "paper_rule"},
}


def cluster(**sections: dict[str, Any]) -> DescribedCluster:
    small = {
        "pools": {"instances": 1, "trainer_gpus": 1},
        "lengths": {
            "samples": 8,
            "prompt_tokens": 0,
            "max_new_tokens": 256,
            "draw": "equal",
            "speed_sigma": 0.0,
        },
        "drafter": {"kind": "none"},
        "learner": {"measured_s": 100.0},
        "step": {"steps": 1, "publication_s": 0.0, "other_s": 0.0, "agreement_tokens": 1e9},
    }
    for name, keys in sections.items():
        small[name] = small.get(name, {}) | keys
    return describe(SimulatedClusterConfig.model_validate(small))


def simulated(**sections: dict[str, Any]) -> ClusterResult:
    return simulate_cluster(cluster(**sections))


def plain_s(one: DescribedCluster, first: int, last: int) -> float:
    """Seconds of eight samples from one length to another."""
    return sum(one.instance.plain_s(8, 8 * (done + 0.5)) for done in range(first, last))


def proof_s(one: DescribedCluster, steps: int) -> float:
    """Seconds of steps that verify 16 draft tokens of each of eight samples."""
    forwards = (one.instance.target.forward_s(8, 17, 8 * 17 * (done + 0.5)) for done in range(steps))
    return sum(forwards)


def test_what_was_decoded_beside_the_update_is_verified_seventeen_tokens_a_step() -> None:
    one = cluster(step={"look_ahead": "auto"})
    made = simulate_cluster(one).plain
    # 256 tokens in 16 steps
    assert made.rollout_s == pytest.approx(proof_s(one, 16), rel=0.02)
    assert made.step_s == pytest.approx(made.rollout_s + 100.0)
    assert (made.steps.attempted_tokens, made.steps.proved_tokens) == (8 * 256, 8 * 256)


def test_an_update_s_time_is_what_attempts_have_and_the_rest_is_decoded() -> None:
    half_s = plain_s(cluster(), 0, 128)
    one = cluster(step={"look_ahead": "auto"}, learner={"measured_s": half_s})
    made = simulate_cluster(one).plain
    assert made.steps.attempted_tokens == pytest.approx(8 * 128, abs=8)
    # 128 tokens and the target's own one more in 8 steps
    assert made.rollout_s == pytest.approx(proof_s(one, 8) + plain_s(one, 129, 256), rel=0.02)


def test_behind_the_first_difference_it_decodes_as_ever() -> None:
    parted = simulated(step={"look_ahead": "auto", "agreement_tokens": 1.0}).plain
    assert parted.steps.attempted_tokens == 8 * 256 and parted.steps.proved_tokens == 0
    ever = simulated().plain
    assert ever.rollout_s < parted.rollout_s < 1.01 * ever.rollout_s, "a step that verified in vain"


def test_instances_that_are_the_trainer_s_gpus_rest_while_it_learns() -> None:
    shared = {"colocated": True}
    assert simulated(pools=shared, step={"look_ahead": "auto"}).plain.steps.attempted_tokens == 0
    tail = {"draw": "long_tail", "samples": 32}
    ahead = simulated(pools=shared, lengths=tail, step={"look_ahead": "auto"})
    assert 0 < ahead.plain.steps.proved_tokens <= ahead.plain.steps.attempted_tokens
    assert ahead.plain.step_s < simulated(pools=shared, lengths=tail).plain.step_s


def test_a_run_that_attempts_nothing_is_the_run_that_it_was_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LookAheadLaw, "num_attempts", lambda self, **how: 0)
    off = simulated(**MOVING, step={"steps": 1})
    none = simulated(**MOVING, step={"steps": 1, "look_ahead": "auto"})
    assert off.plain.moves > 0 and none.plain.steps.attempted_tokens == 0
    assert replace(none.plain.steps, why_attempted="") == off.plain.steps
    assert replace(none.plain, steps=off.plain.steps) == off.plain


def test_samples_take_the_slots_of_attempts_and_move_with_their_drafts() -> None:
    """Forced into every free slot; lengths that one instance has most of make samples move there."""
    one = cluster(**MOVING, step={"look_ahead": 16, "steps": 1})
    made = simulate_cluster(one).plain
    assert made.moves > 0 and 0 < made.steps.proved_tokens <= made.steps.attempted_tokens
    assert made.steps.proved_tokens <= one.samples(0).response_tokens.sum()
