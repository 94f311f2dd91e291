"""Laws of the pool's size: within limits, no back and forth, only who is idle or drained leaves, starts must pay."""

import random
from dataclasses import replace

import numpy as np
import pytest
from pool_views import cpu_curve, pool_view

from rlhfspec.policies.reallocation.pool_records import PoolView
from rlhfspec.policies.scaling.forecast import Forecast
from rlhfspec.policies.scaling.scaling_policy import ScalingPolicy
from rlhfspec.policies.scaling.scaling_records import Candidate, Limits, PoolFacts, Resize, Starts
from rlhfspec.policies.scaling.scaling_rule import decide

LIMITS = Limits(least=1, most=6, idle_timeout_s=20.0)


def forecast(num_open: int, *, limit: int = 256, num_slots: int = 16) -> Forecast:
    """Samples that have not begun, of a rollout of which nothing is known."""
    policy = ScalingPolicy(cpu_curve(), LIMITS)
    view = pool_view([0] * num_open, num_slots=num_slots, max_new_tokens=limit)
    return policy._facts(view, Starts(), ()).forecast


def facts(num_open: int, *, alive: int = 1, starting: int = 0, surplus_s: float = 0.0, **starts) -> PoolFacts:
    """A pool whose samples are spread evenly; all but the first instance may leave."""
    share = -(-num_open // alive)
    return PoolFacts(
        num_alive=alive,
        num_open=num_open,
        candidates=tuple(
            Candidate(instance=f"gen-{i}", num_samples=share, idle_s=0.0 if share else 1e3)
            for i in range(1, alive)
        ),
        forecast=forecast(num_open),
        starts=Starts(num_starting=starting, **starts),
        surplus_s=surplus_s,
    )


def cases(count: int, seed: int = 0) -> list[PoolFacts]:
    drawn = random.Random(seed)
    return [
        facts(
            drawn.choice([0, 1, 2, 8, 40, 200]),
            alive=drawn.randint(1, 6),
            starting=drawn.choice([0, 0, 1, 2]),
            surplus_s=drawn.choice([0.0, 30.0]),
            start_up_s=drawn.choice([0.0, 0.1, 1.0, 10.0, 300.0]),
            rollouts_ahead=drawn.choice([0, 0, 1, 50]),
            is_blocked=drawn.random() < 0.1,
        )
        for _ in range(count)
    ]


def test_more_instances_are_never_slower_and_a_later_start_never_sooner():
    for num_open in (1, 3, 40, 200):
        one = forecast(num_open)
        times = [one.finish_s(n) for n in range(1, 9)]
        assert times == sorted(times, reverse=True)
        late = [one.finish_s(4, now=2, start_up_s=s) for s in (0.0, 0.5, 2.0, 10.0, 1e6)]
        assert late == sorted(late) and late[0] == one.finish_s(4) and late[-1] == one.finish_s(2)


def test_samples_beyond_the_slots_take_turns():
    crowded, roomy = (forecast(64, num_slots=slots).finish_s(1) for slots in (4, 64))
    assert crowded > 1.2 * roomy


def test_the_size_stays_within_its_limits():
    for one in cases(200):
        for limits in (LIMITS, Limits(least=2, most=3, idle_timeout_s=1.0)):
            change = decide(one, limits)
            if change is None:
                continue
            assert change.reason and limits.least <= change.target
            assert change.target <= max(limits.most, one.num_coming)
            assert one.num_alive - len(change.leave) >= min(limits.least, one.num_alive)


def test_a_start_that_takes_longer_is_never_more_welcome():
    for one in cases(60, seed=1):
        sizes = [
            change.target
            if (change := decide(replace(one, starts=replace(one.starts, start_up_s=s)), LIMITS))
            else 0
            for s in (0.0, 0.3, 1.0, 5.0, 40.0, 1e4)
            if one.surplus_s == 0.0 and one.num_open
        ]
        grown = [max(size, one.num_coming) for size in sizes]
        assert grown == sorted(grown, reverse=True)


@pytest.mark.parametrize("rollouts_ahead", [0, 3, 100])
def test_a_load_that_does_not_change_is_answered_once(rollouts_ahead):
    """Every decision is carried out at once; the samples stay as they are, and time passes."""
    for num_open in (1, 4, 16, 64, 300):
        for start_up_s in (0.0, 0.5, 3.0, 20.0, 200.0):
            sizes = [3]
            for _ in range(20):
                one = facts(num_open, alive=sizes[-1], surplus_s=60.0)
                one = replace(one, starts=Starts(start_up_s=start_up_s, rollouts_ahead=rollouts_ahead))
                change = decide(one, LIMITS)
                sizes.append(change.target if change else sizes[-1])
            assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True), (
                num_open,
                start_up_s,
                sizes,
            )
            assert sizes[-1] == sizes[-2]


def test_with_samples_open_an_instance_leaves_only_where_it_is_not_missed_and_is_the_emptiest():
    one = facts(3, alive=4, surplus_s=30.0)
    few = replace(one, candidates=(Candidate(instance="full", num_samples=2, idle_s=0.0),
                                   Candidate(instance="empty", num_samples=0, idle_s=9.0)))  # fmt: skip
    change = decide(few, LIMITS)
    assert change is not None and change.leave == ("empty",) and "empty leaves" in change.reason
    assert decide(replace(few, surplus_s=10.0), LIMITS) is None
    change = decide(replace(one, num_open=200, forecast=forecast(200)), LIMITS)
    assert change is not None and change.target > 4 and not change.leave


def test_between_rollouts_whoever_idled_long_enough_leaves_down_to_the_least():
    idle = facts(0, alive=4, start_up_s=50.0)
    assert decide(idle, LIMITS).leave == ("gen-1", "gen-2", "gen-3")
    young = tuple(replace(one, idle_s=30.0) for one in idle.candidates)
    # what takes long to start is kept as long when there are rollouts to come
    assert decide(replace(idle, candidates=young), LIMITS) is not None
    ahead = replace(idle, candidates=young, starts=replace(idle.starts, rollouts_ahead=2))
    assert decide(ahead, LIMITS) is None


def test_one_that_starts_is_given_up_before_one_that_runs():
    change = decide(facts(2, alive=3, starting=1, surplus_s=30.0, start_up_s=30.0), LIMITS)
    assert change is not None and change.target == 3 and not change.leave


def test_below_the_least_the_pool_is_filled_up_but_not_right_after_a_failed_start():
    limits = Limits(least=3, most=3, idle_timeout_s=1.0)
    assert decide(facts(0, alive=1, starting=1), limits) == Resize(
        target=3, reason="the pool has 2 of at least 3 instances"
    )
    assert decide(facts(0, alive=1, is_blocked=True), limits) is None


def grown_view(now_s: float, tokens: int) -> PoolView:
    view = pool_view([tokens] * 20, [tokens] * 12, now_s=now_s, num_queued=30, num_slots=20)
    rated = [replace(one, goodput_tokens_per_s=900.0, goodput_samples=12.0) for one in view.instances]
    return replace(view, instances=tuple(rated))


def test_equal_views_give_equal_decisions():
    def decisions() -> list[Resize | None]:
        policy = ScalingPolicy(cpu_curve(), LIMITS)
        made = []
        for look in range(12):
            policy.note_finished(20 + look)
            made.append(
                policy.plan(grown_view(look * 1.0, look), Starts(start_up_s=0.1), may_leave=("gen-1",))
            )
        return made

    first = decisions()
    assert first == decisions() and first[0] is not None and first[0].target > 2


def test_without_moves_an_added_instance_counts_for_queued_samples_only():
    alone = pool_view([5] * 12, [5] * 12, num_slots=20)
    for view, can_move, grows in (
        (alone, True, True),
        (alone, False, False),
        (grown_view(0.0, 5), False, True),
    ):
        change = ScalingPolicy(cpu_curve(), LIMITS, can_move=can_move).plan(view, Starts(), may_leave=())
        assert (change is not None) == grows


def test_who_leaves_takes_no_part():
    view = pool_view([5] * 12, [], num_slots=20)
    leaving = replace(view.instances[1], is_leaving=True, num_slots=0, idle_s=1e3)
    view = replace(view, instances=(view.instances[0], leaving))
    change = ScalingPolicy(cpu_curve(), LIMITS).plan(view, Starts(), may_leave=("gen-1",))
    assert change is not None and change.target >= 2 and not change.leave
    assert np.isfinite(ScalingPolicy(cpu_curve(), LIMITS)._facts(view, Starts(), ()).forecast.finish_s(1))
