"""Batches that run into one another: times by hand, and what holds for any of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.simulate.cluster_simulation import simulate_cluster
from rlhfspec.policies.simulate.described_cluster import describe
from rlhfspec.policies.simulate.scheduled_run import Batches, simulate_phases
from rlhfspec.policies.simulate.simulation_records import MoveTruth, PoolSetup, Samples, joined, samples_of
from rlhfspec.policies.staleness.free import Free, FreeAdmission
from rlhfspec.policies.staleness.recorded import PhasePlan, Recorded

EVEN = RateCurve([1, 64], [100.0, 6400.0])
"10 ms a token, whoever else runs."


@dataclass(frozen=True)
class Played:
    """Of each update: when its version was in the instances, and the groups that it learned from."""

    loaded_s: list[float]
    learned: list[list[int]]
    oldest: list[int]
    "weight version of any token"

    @property
    def updates(self) -> list[int]:
        """Of each group the update that learned from it."""
        by_group = {group: update for update, groups in enumerate(self.learned) for group in groups}
        return [by_group[group] for group in sorted(by_group)]


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
) -> Played:
    given = Batches(
        [samples_of(np.array(batch)) for batch in batches],
        [training_s] * len(batches),
        group_samples=group_samples,
    )
    admission = FreeAdmission(
        max_staleness=staleness,
        over_provisioning=over_provisioning,
        groups_per_batch=len(batches[0]) // group_samples,
        num_iterations=len(batches),
    )
    pool = PoolSetup(
        num_instances=instances,
        num_slots=slots,
        curve=EVEN,
        max_new_tokens=256,
        moves=MoveTruth(kv_bytes_per_token=1.0),
        prompt_token_s=prompt_token_s,
    )
    phases = list(
        simulate_phases(
            Free(admission, given.next_groups),
            given,
            setup=lambda samples: pool,
            policy=lambda: None,
            binding="pull",
        )
    )
    whole = np.array([length for batch in batches for length in batch])
    learned = []
    for phase in phases:
        for one in phase.learned:
            assert one.completion.num_tokens == whole[one.completion.key.sample_index]
        learned.append(sorted({one.completion.group_id for one in phase.learned}))
    return Played(
        loaded_s=np.cumsum([phase.seconds + pause_s for phase in phases]).tolist(),
        learned=learned,
        oldest=[
            min(span.weight_version for one in phase.learned for span in one.completion.weight_spans)
            for phase in phases
        ],
    )


def test_an_update_cuts_what_is_open_and_lets_the_next_group_begin() -> None:
    """Update 0 from 0.10 to 0.15, loaded at 0.16; 1 is cut at 15 tokens, whole at 0.21; 2 begins at 0.16."""
    made = free([[10], [20], [9]])
    assert made.loaded_s == pytest.approx((0.16, 0.27, 0.33))
    assert (made.oldest, made.updates) == ([0, 0, 1], [0, 1, 2])


def test_what_ends_first_is_learned_from_first() -> None:
    """The longer one began first, and is in time for the last update that may learn from it."""
    made = free([[30], [10], [5]])
    assert made.updates == [1, 0, 2]
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
        assert len(made.loaded_s) == len(batches) and made.loaded_s == sorted(made.loaded_s)
        assert all(update - oldest <= staleness for update, oldest in enumerate(made.oldest))
        assert (np.bincount(made.updates) == width // size).all()
        assert len(made.updates) == len(batches) * width // size


def recorded(batches: list[Samples], *, staleness: int, max_new_tokens: int) -> tuple[Recorded, Batches]:
    given = Batches(batches, [0.0] * len(batches), group_samples=1)
    plan = PhasePlan(
        max_staleness=staleness, weight_load="reprefill", max_new_tokens=max_new_tokens, num_iterations=6
    )
    return Recorded(plan, given.next_batch), given


def played_samples(batches: list[Samples], *, staleness: int, max_new_tokens: int) -> list[Samples]:
    """What the pools of the phases are given."""
    seen: list[Samples] = []

    def setup(samples: Samples) -> PoolSetup:
        seen.append(samples)
        return PoolSetup(
            num_instances=1,
            num_slots=4,
            curve=EVEN,
            max_new_tokens=256,
            moves=MoveTruth(kv_bytes_per_token=1.0),
        )

    schedule, given = recorded(batches, staleness=staleness, max_new_tokens=max_new_tokens)
    phases = simulate_phases(schedule, given, setup=setup, policy=lambda: None, binding="pull")
    for phase in itertools.islice(phases, 3):
        assert phase.learned
    return seen


def test_a_phase_goes_on_with_what_is_cut() -> None:
    batch = Samples(response_tokens=np.array([5, 12]), prompt_tokens=np.array([3, 4]), speed=np.ones(2))
    for samples in played_samples([batch], staleness=2, max_new_tokens=16):
        # the second half of the longer one, then the next batch as far as 8 tokens
        assert samples.response_tokens.tolist() == [4, 5, 8]
        assert samples.prompt_tokens.tolist() == [12, 3, 4]
    for whole in played_samples([batch], staleness=1, max_new_tokens=16):
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
    first, second, _ = played_samples([whole], staleness=2, max_new_tokens=16)
    assert first.group is not None and second.group is not None
    assert first.group[0] == -1 and first.group[1] == first.group[2] >= 0
    assert second.group[1] != first.group[1]


def test_a_phase_takes_its_batches_in_turn() -> None:
    ones = [
        Samples(response_tokens=np.array([n]), prompt_tokens=np.array([0]), speed=np.ones(1))
        for n in (1, 2, 3)
    ]
    got = [samples.response_tokens[0] for samples in played_samples(ones, staleness=1, max_new_tokens=8)]
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
