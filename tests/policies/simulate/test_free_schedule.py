"""Batches that run into one another: times by hand, and what holds for any of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from core.settings.simulated_cluster import SimulatedClusterConfig
from policies.reallocation.no_moves import NoMoves
from policies.reallocation.rate_curve import RateCurve
from policies.simulate.free_schedule import FreeRun, Update, play_free
from policies.simulate.performance.cluster_simulation import simulate_cluster
from policies.simulate.performance.described_cluster import describe
from policies.simulate.performance.played_steps import phase_samples
from policies.simulate.simulation_records import MoveTruth, PoolSetup, Samples
from policies.simulate.workloads import samples_of

EVEN = RateCurve([1, 64], [100.0, 6400.0])
"10 ms a token, whoever else runs."


def free(lengths: list[list[int]], *, slots: int = 2, instances: int = 1, **update: float) -> FreeRun:
    return play_free(
        samples_of(np.array(list(itertools.chain(*lengths)))),
        batch=np.repeat(np.arange(len(lengths)), [len(batch) for batch in lengths]),
        setup=PoolSetup(
            num_instances=instances,
            num_slots=slots,
            curve=EVEN,
            max_new_tokens=256,
            moves=MoveTruth(kv_bytes_per_token=1.0),
            prompt_token_s=update.pop("prompt_token_s", 0.0),
        ),
        policy=NoMoves("pull"),
        binding="pull",
        update=Update(
            training_s=(update.get("training", 0.05),) * len(lengths),
            other_s=update.get("other", 0.0),
            publication_s=update.get("publication", 0.01),
            staleness=int(update.get("staleness", 1)),
        ),
    )


def test_an_update_cuts_what_is_open_and_lets_the_next_batch_begin() -> None:
    """Update 0 from 0.10 to 0.15, loaded at 0.16; 1 is cut at 15 tokens, whole at 0.21; 2 begins at 0.16."""
    made = free([[10], [20], [9]])
    assert made.loaded_s == pytest.approx((0.16, 0.27, 0.33))
    assert made.begun_version == (0, 0, 1)


def test_caches_are_computed_anew() -> None:
    """The cut response has 15 tokens of context: 15 ms more before it goes on."""
    made = free([[10], [20]], prompt_token_s=0.001)
    # 0.25 s of decoding and publication, 15 ms; the update of 0.05 s and 0.01 s
    assert made.loaded_s[1] == pytest.approx(0.21 + 0.015 + 0.06)


def test_no_sample_begins_too_early_and_every_batch_is_learned_from_once() -> None:
    draw = np.random.default_rng(3)
    for _ in range(60):
        staleness = int(draw.integers(1, 4))
        lengths = [draw.integers(1, 30, draw.integers(1, 6)).tolist() for _ in range(draw.integers(2, 7))]
        made = free(
            lengths,
            slots=int(draw.integers(1, 4)),
            instances=int(draw.integers(1, 3)),
            training=float(draw.uniform(0.01, 0.4)),
            staleness=staleness,
        )
        batch = np.repeat(np.arange(len(lengths)), [len(one) for one in lengths])
        begun = np.array(made.begun_version)
        assert len(made.loaded_s) == len(lengths) and list(made.loaded_s) == sorted(made.loaded_s)
        assert ((batch - begun <= staleness) & (begun <= batch)).all()
        assert made.result.num_tokens == sum(map(sum, lengths))


def test_a_phase_goes_on_with_what_is_cut() -> None:
    batch = Samples(response_tokens=np.array([5, 12]), prompt_tokens=np.array([3, 4]), speed=np.ones(2))
    samples = phase_samples([batch], 10, staleness=2, max_new_tokens=16)
    # the second half of the longer one, then the next batch as far as 8 tokens
    assert samples.response_tokens.tolist() == [4, 5, 8]
    assert samples.prompt_tokens.tolist() == [12, 3, 4]
    whole = phase_samples([batch], 10, staleness=1, max_new_tokens=16)
    assert whole.response_tokens.tolist() == [5, 12]


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
