"""TLT's bandit by hand: arms, buckets, rewards, and chance that a log replays."""

import pytest

from rlhfspec.core.config import SpeculationConfig
from rlhfspec.core.decode_records import Budget, DecodeState, StepRecord
from rlhfspec.engine.draft_policies import build_policy
from rlhfspec.policies.drafting.baselines import BanditPolicy, bucket
from rlhfspec.policies.drafting.draft_policy import DraftPolicy


def state(num_samples: int = 4, decode_step: int = 0, remaining: int = 100) -> DecodeState:
    return DecodeState(
        decode_step=decode_step,
        num_samples=num_samples,
        context_tokens=50,
        max_remaining_tokens=remaining,
    )


def record(state: DecodeState, budget: Budget, *, tokens: int, seconds: float) -> StepRecord:
    return StepRecord(
        state=state,
        budget=budget,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_accepted_rank2_plus=0,
        num_emitted_tokens=tokens,
        draft_s=seconds / 4,
        verify_s=seconds / 4,
        accept_s=seconds / 4,
        other_s=seconds / 4,
    )


def play(policy: BanditPolicy, now: DecodeState, tokens: dict[int, int], seconds: float = 1.0) -> Budget:
    """One decode step that emits so many tokens for an arm of so many nodes."""
    budget = policy.plan(now)
    policy.observe(record(now, budget, tokens=tokens[budget.num_nodes], seconds=seconds))
    return budget


def small(**kw) -> BanditPolicy:
    """Arms 0, 2 and 4: chains only."""
    return BanditPolicy(max_nodes=4, max_depth=4, **kw)


@pytest.mark.parametrize(
    ("max_nodes", "max_depth", "arms"),
    [
        (16, 16, [(0, 0, 0), (2, 2, 1), (4, 4, 1), (8, 8, 1), (16, 16, 1), (8, 4, 2), (16, 5, 3)]),
        (8, 4, [(0, 0, 0), (2, 2, 1), (4, 4, 1), (8, 4, 2)]),
        (6, 16, [(0, 0, 0), (2, 2, 1), (4, 4, 1), (6, 6, 1)]),
        (1, 16, [(0, 0, 0), (1, 1, 1)]),
    ],
)
def test_every_arm_is_tried_first_and_fits_the_limits(
    max_nodes: int, max_depth: int, arms: list[tuple[int, int, int]]
) -> None:
    policy = BanditPolicy(max_nodes=max_nodes, max_depth=max_depth)
    played = []
    for step in range(len(arms)):
        now = state(decode_step=step)
        budget = policy.plan(now)
        assert budget.reason.endswith("explore, not tried yet")
        policy.observe(record(now, budget, tokens=4, seconds=1.0))
        played.append((budget.num_nodes, budget.depth, budget.branching))
    assert played == arms
    assert policy.max_nodes == max(nodes for nodes, _, _ in arms) <= max_nodes
    assert "not tried" not in policy.plan(state(decode_step=len(arms))).reason


@pytest.mark.parametrize(
    ("num_samples", "first"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (31, 16), (32, 32)]
)
def test_buckets_are_powers_of_two(num_samples: int, first: int) -> None:
    assert bucket(num_samples) == first


def test_the_best_goodput_is_played_and_named() -> None:
    policy = small(epsilon=0.0)
    for step in range(3):
        play(policy, state(decode_step=step), {0: 4, 2: 9, 4: 7}, seconds=0.5)
    best = policy.plan(state(decode_step=3))
    assert best.num_nodes == 2
    assert best.reason == "bandit: 4 to 7 samples, arm, 2 nodes, depth 2, branching 1: exploit, 18 tokens/s"


def test_the_reward_is_all_tokens_over_all_seconds_of_the_window() -> None:
    policy = small(epsilon=0.0, window=2)
    _, two, four = (play(policy, state(decode_step=s), {0: 4, 2: 30, 4: 5}) for s in range(3))
    # 30 tokens in one second, then 10 in nine: 4 tokens/s, where a mean of ratios would say 15.6
    policy.observe(record(state(), two, tokens=10, seconds=9.0))
    assert policy.plan(state(decode_step=4)).num_nodes == four.num_nodes
    # the window forgets the slow one: two fast ones remain
    for _ in range(2):
        policy.observe(record(state(), two, tokens=12, seconds=2.0))
    best = policy.plan(state(decode_step=6))
    assert best.num_nodes == 2
    assert best.reason.endswith("exploit, 6 tokens/s")


def test_buckets_learn_apart() -> None:
    policy = small(epsilon=0.0)
    for step in range(3):
        play(policy, state(4, decode_step=step), {0: 1, 2: 2, 4: 9})
    assert policy.plan(state(8, decode_step=3)).reason.startswith("bandit: 8 to 15 samples, arm, no draft")
    for step in range(3, 6):
        play(policy, state(8, decode_step=step), {0: 9, 2: 2, 4: 1})
    assert policy.plan(state(7, decode_step=6)).num_nodes == 4
    assert policy.plan(state(15, decode_step=6)).is_plain


def test_arms_deeper_than_any_response_are_left_out() -> None:
    policy = small(epsilon=0.0)
    for step in range(3):
        play(policy, state(decode_step=step), {0: 1, 2: 2, 4: 9})
    nodes = {left: policy.plan(state(decode_step=3, remaining=left)).num_nodes for left in (6, 5, 4, 3, 2, 1)}
    assert nodes == {6: 4, 5: 4, 4: 2, 3: 2, 2: 0, 1: 0}
    # nor is an arm that never fits awaited for ever
    fresh = small(epsilon=0.0)
    for step in range(2):
        play(fresh, state(decode_step=step, remaining=3), {0: 1, 2: 2})
    assert "exploit" in fresh.plan(state(decode_step=2, remaining=3)).reason


def test_it_explores_as_often_as_epsilon_says() -> None:
    policy = small(epsilon=0.25)
    for step in range(3):
        play(policy, state(decode_step=step), {0: 1, 2: 2, 4: 9})
    plans = [policy.plan(state(decode_step=step)) for step in range(3, 2003)]
    explored = [plan.num_nodes for plan in plans if plan.reason.endswith("explore, by chance")]
    # 500 expected; 5 standard deviations are 97
    assert 400 < len(explored) < 600
    assert {plan.num_nodes for plan in plans if "exploit" in plan.reason} == {4}
    assert all(explored.count(arm) > 100 for arm in (0, 2, 4))


def test_exploration_depends_on_seed_and_decode_step_alone() -> None:
    def explorations(seed: int, steps: range) -> list[str]:
        policy = small(epsilon=0.5, seed=seed)
        for step in range(3):
            play(policy, state(decode_step=step), {0: 1, 2: 2, 4: 9})
        return [policy.plan(state(decode_step=step)).reason for step in steps]

    whole = explorations(0, range(3, 103))
    # asked for a part of the steps, or backwards, the answers are the same
    assert explorations(0, range(53, 103)) == whole[50:]
    assert explorations(0, range(102, 2, -1)) == whole[::-1]
    assert explorations(1, range(3, 103)) != whole


def test_config_names_the_policy() -> None:
    policy = build_policy(SpeculationConfig(policy="bandit", max_nodes=6, max_depth=6))
    assert isinstance(policy, BanditPolicy)
    assert isinstance(policy, DraftPolicy)
    assert policy.max_nodes == 6
