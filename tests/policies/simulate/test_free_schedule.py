"""Batches that run into one another: times by hand, and what holds for any of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.schedule.free import FreeAdmission
from rlhfspec.policies.simulate.cluster_simulation import simulate_cluster
from rlhfspec.policies.simulate.described_cluster import describe
from rlhfspec.policies.simulate.rollout_player import FreeRun, joined, phase_samples
from rlhfspec.policies.simulate.simulation_records import MoveTruth, PoolSetup, Samples
from rlhfspec.policies.simulate.workloads import samples_of

EVEN = RateCurve([1, 64], [100.0, 6400.0])
"10 ms a token, whoever else runs."


def free(
    batches: list[list[int]],
    *,
    slots: int = 2,
    instances: int = 1,
    group_samples: int = 1,
    training_s: float = 0.05,
    pause_s: float = 0.01,
    staleness: int = 1,
    over_provisioning: float = 1.0,
    prompt_token_s: float = 0.0,
) -> FreeRun:
    lengths = np.array(list(itertools.chain(*batches)))
    run = FreeRun(
        samples_of(lengths),
        group_samples,
        FreeAdmission(
            max_staleness=staleness,
            over_provisioning=over_provisioning,
            groups_per_batch=len(batches[0]) // group_samples,
            num_iterations=len(batches),
        ),
        setup=PoolSetup(
            num_instances=instances,
            num_slots=slots,
            curve=EVEN,
            max_new_tokens=256,
            moves=MoveTruth(kv_bytes_per_token=1.0),
            prompt_token_s=prompt_token_s,
        ),
        policy=None,
        binding="pull",
        update_s=np.full(len(lengths), training_s / len(batches[0])),
        pause_s=pause_s,
    )
    assert run.run().num_tokens == int(lengths.sum())
    return run


def learned(run: FreeRun) -> tuple[int, ...]:
    return tuple(run.learned[group] for group in range(len(run.begun)))


def test_an_update_cuts_what_is_open_and_lets_the_next_group_begin() -> None:
    """Update 0 from 0.10 to 0.15, loaded at 0.16; 1 is cut at 15 tokens, whole at 0.21; 2 begins at 0.16."""
    made = free([[10], [20], [9]])
    assert made.loaded_s == pytest.approx((0.16, 0.27, 0.33))
    assert (made.begun, learned(made)) == ([0, 0, 1], (0, 1, 2))


def test_what_ends_first_is_learned_from_first() -> None:
    """The longer one began first, and is in time for the last update that may learn from it."""
    made = free([[30], [10], [5]])
    assert learned(made) == (1, 0, 2)
    # cut at 15 tokens for 0.01 s, whole at 0.31
    assert made.loaded_s[:2] == pytest.approx((0.16, 0.37))


def test_caches_are_computed_anew() -> None:
    """The cut response has 15 tokens of context: 15 ms more before it goes on."""
    made = free([[10], [20]], prompt_token_s=0.001)
    # 0.2 s of decoding, the pause, 15 ms; the update of 0.05 s and the pause
    assert made.loaded_s[1] == pytest.approx(0.21 + 0.015 + 0.06)


def test_no_sample_is_too_stale_and_every_group_is_learned_from_once() -> None:
    draw = np.random.default_rng(3)
    for _ in range(60):
        staleness, size = int(draw.integers(1, 4)), int(draw.integers(1, 3))
        width = size * int(draw.integers(1, 4))
        batches = [draw.integers(1, 30, width).tolist() for _ in range(draw.integers(2, 7))]
        made = free(
            batches,
            slots=int(draw.integers(1, 4)),
            instances=int(draw.integers(1, 3)),
            group_samples=size,
            training_s=float(draw.uniform(0.01, 0.4)),
            staleness=staleness,
            over_provisioning=float(draw.choice([0.5, 1.0, staleness])),
        )
        begun, by_update = np.array(made.begun), np.array(learned(made))
        assert len(made.loaded_s) == len(batches) and list(made.loaded_s) == sorted(made.loaded_s)
        assert ((by_update - begun <= staleness) & (begun <= by_update)).all()
        assert (np.bincount(by_update) == width // size).all() and len(by_update) == len(
            batches
        ) * width // size


def test_a_phase_goes_on_with_what_is_cut() -> None:
    batch = Samples(response_tokens=np.array([5, 12]), prompt_tokens=np.array([3, 4]), speed=np.ones(2))
    samples = phase_samples([batch], 10, staleness=2, max_new_tokens=16)
    # the second half of the longer one, then the next batch as far as 8 tokens
    assert samples.response_tokens.tolist() == [4, 5, 8]
    assert samples.prompt_tokens.tolist() == [12, 3, 4]
    whole = phase_samples([batch], 10, staleness=1, max_new_tokens=16)
    assert whole.response_tokens.tolist() == [5, 12]


def test_groups_of_several_batches_stay_apart() -> None:
    whole = Samples(
        response_tokens=np.array([5, 12]),
        prompt_tokens=np.array([3, 4]),
        speed=np.ones(2),
        group=np.array([7, 7]),
    )
    got = joined([whole, samples_of(np.array([3])), whole]).group
    assert got is not None and got.tolist() == [7, 7, -1, 15, 15]
    cut = phase_samples([whole], 10, staleness=2, max_new_tokens=16).group
    assert cut is not None and cut[0] == -1 and cut[1] == cut[2] >= 0


def test_a_phase_takes_its_batches_in_turn() -> None:
    ones = [
        Samples(response_tokens=np.array([n]), prompt_tokens=np.array([0]), speed=np.ones(1))
        for n in (1, 2, 3)
    ]
    got = [
        phase_samples(ones, step + 3, staleness=1, max_new_tokens=8).response_tokens[0] for step in range(3)
    ]
    assert got == [2, 3, 1]


def test_without_waits_for_the_slowest_a_step_is_shorter() -> None:
    steps = {}
    for schedule, staleness in (("recorded", 0), ("recorded", 1), ("free", 1), ("recorded", 2), ("free", 2)):
        config = SimulatedClusterConfig.model_validate(
            {
                "pools": {"instances": 2, "trainer_gpus": 2, "slots": 8},
                "lengths": {"samples": 64, "prompt_tokens": 16, "max_new_tokens": 512},
                "drafter": {"kind": "none"},
                "learner": {"measured_s": 1.0},
                "step": {"steps": 2, "staleness": staleness, "schedule": schedule, "other_s": 0.0},
            }
        )
        made = simulate_cluster(describe(config)).plain
        steps[schedule, staleness] = made.step_s
        assert made.step_s >= 1.0 and 0.0 <= made.instances_idle <= 1.0
    assert steps["free", 1] < steps["recorded", 1] < steps["recorded", 0]
    assert steps["free", 2] <= steps["free", 1] * 1.02


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"lengths": {"samples": 10, "group_samples": 4}}, "whole groups"),
        ({"step": {"staleness": 1, "over_provisioning": 0.5}}, "needs step.schedule free"),
        ({"step": {"staleness": 1, "over_provisioning": 2.0, "schedule": "free"}}, "as much step.staleness"),
    ],
)
def test_what_has_no_effect_is_refused(sections: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SimulatedClusterConfig.model_validate(sections)
