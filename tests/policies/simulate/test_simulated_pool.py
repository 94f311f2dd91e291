"""Late news of ended samples, messages, prompts, a machine that is shared: times computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.simulate.simulated_instance import SharedMachine
from rlhfspec.policies.simulate.simulated_pool import SimulatedPool, simulate
from rlhfspec.policies.simulate.simulation_records import (
    MoveTruth,
    PoolSetup,
    Samples,
    SimulationResult,
    samples_of,
)

LINE = RateCurve(np.arange(1, 65), 1.0 / (0.006 / np.arange(1, 65) + 0.004))
"6 ms and 4 ms a sample, of a token."


def setup(num_instances: int, num_slots: int) -> PoolSetup:
    return PoolSetup(
        num_instances=num_instances,
        num_slots=num_slots,
        curve=LINE,
        max_new_tokens=256,
        moves=MoveTruth(kv_bytes_per_token=1.0),
    )


def played(samples: Samples, pool: PoolSetup, **changes: object) -> SimulationResult:
    return simulate(samples, replace(pool, **changes), None)


def beside(samples: Samples, pool: PoolSetup, update_s: float) -> SimulationResult:
    """With an update from the start on."""

    class Beside(SimulatedPool):
        def _begin_run(self) -> None:
            self._learn(update_s)
            super()._begin_run()

    return Beside(samples, pool, None, "pull", None).run()


def lengths(*tokens: int) -> Samples:
    return samples_of(np.array(tokens))


def test_a_slot_stands_empty_until_the_scheduler_hears_of_it() -> None:
    """0 ends at 0.14 and is told of; 1 ends at 0.168, told at 0.19; 2 alone meanwhile, beside 3 until 0.2712."""
    four = lengths(10, 12, 10, 10)
    assert played(four, setup(1, 2), report_interval_s=0.05).finish_s == pytest.approx(0.3132)
    assert played(four, setup(1, 2)).finish_s == pytest.approx(0.30)


def test_samples_in_line_take_the_slot_at_once() -> None:
    """With 8 slots two wait in line: as fast as if news came at once, until the scheduler's own line is short."""
    many = samples_of(np.random.default_rng(0).integers(5, 40, 400))
    even = RateCurve([1, 64], [100.0, 6400.0])
    pools = {slots: replace(setup(1, slots), curve=even) for slots in (3, 8)}
    late = {slots: played(many, pool, report_interval_s=0.05).finish_s for slots, pool in pools.items()}
    soon = {slots: played(many, pool).finish_s for slots, pool in pools.items()}
    assert late[8] / soon[8] < 1.02 < 1.03 < late[3] / soon[3]


def test_messages_and_what_a_last_step_wastes() -> None:
    assert played(lengths(10), setup(1, 1), message_s=0.005).finish_s == pytest.approx(0.11)
    assert played(lengths(10), setup(1, 1), last_step_tokens=2.0).finish_s == pytest.approx(0.12)


def test_prompts_hold_decode_steps_up() -> None:
    ten = replace(lengths(10), prompt_tokens=np.array([30]))
    made = played(ten, setup(1, 1), prompt_s=0.02, prompt_token_s=0.001)
    assert made.finish_s == pytest.approx(0.15) == made.busy_s[0]


def test_a_group_shares_its_prompt_where_another_of_it_runs() -> None:
    four = replace(lengths(10, 10, 10, 10), prompt_tokens=np.full(4, 30), group=np.array([0, 0, 1, -1]))
    made = played(four, setup(1, 2), prompt_token_s=0.001)
    # 0 and 1 together behind one prompt; 2 and 3, of nobody's, behind two
    assert made.finish_s == pytest.approx(0.03 + 0.14 + 0.06 + 0.14)
    apart = played(replace(four, group=None), setup(1, 2), prompt_token_s=0.001)
    assert apart.finish_s == pytest.approx(made.finish_s + 0.03)


@pytest.mark.parametrize(
    ("cores", "num_busy", "factor"),
    [(2, 0, 1.0), (2, 1, 1.0), (2, 2, 1.5), (2, 3, 2.25), (1, 2, 2.0), (3, 2, 1.25)],
)
def test_cores_are_shared_out(cores: int, num_busy: int, factor: float) -> None:
    assert SharedMachine(cores=cores, slowdown=1.5).factor(num_busy) == pytest.approx(factor)
    beside = SharedMachine(cores=cores, slowdown=1.5).factor(max(num_busy - 1, 0), trainer=True)
    assert beside == pytest.approx(factor)


def test_others_take_their_share_of_the_cores() -> None:
    machine = SharedMachine(cores=2, slowdown=1.5, background=0.5, resting=0.2)
    assert machine.factor(1) == pytest.approx(1.25)
    assert machine.factor(1, trainer=True) == pytest.approx(1.5 * 1.25)
    assert machine.factor(0, trainer=True) == pytest.approx(1.1)


def test_an_instance_is_faster_once_the_other_has_nothing_left() -> None:
    machine = SharedMachine(cores=2, slowdown=1.5)
    made = played(lengths(10, 20), setup(2, 1), machine=machine)
    # the curve is of both busy
    assert made.finish_s == pytest.approx(0.1 + 0.1 / 1.5)


def test_an_update_beside_the_rollout_slows_both() -> None:
    machine = SharedMachine(cores=2, slowdown=1.5)
    made = beside(lengths(10), replace(setup(1, 1), machine=machine), 0.05)
    # 0.05 s of work take 0.075 s; by then half of the tokens are made
    assert made.learner_end_s == pytest.approx(0.075)
    assert made.finish_s == pytest.approx(0.125)
    longer = beside(lengths(10), replace(setup(1, 1), machine=machine), 0.3)
    assert longer.finish_s == pytest.approx(0.15)
    assert longer.learner_end_s == pytest.approx(0.15 + 0.2)


def test_an_update_elsewhere_slows_nobody() -> None:
    made = beside(lengths(10), setup(1, 1), 0.3)
    assert (made.finish_s, made.learner_end_s) == pytest.approx((0.1, 0.3))
