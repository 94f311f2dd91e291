"""Draft policies by hand: off, fixed, capacity, and the arithmetic of tree shapes."""

import pytest

from rlhfspec.core.config import SpeculationConfig
from rlhfspec.core.decode_records import PLAIN, Budget, DecodeState
from rlhfspec.engine.draft_policies import build_policy
from rlhfspec.policies.drafting.baselines import (
    BanditPolicy,
    FixedPolicy,
    OffPolicy,
    clip_depth,
    max_tree_nodes,
    narrowest_width,
)
from rlhfspec.policies.drafting.draft_policy import DraftPolicy


def state(num_samples: int = 4, remaining: int = 100) -> DecodeState:
    return DecodeState(
        decode_step=0, num_samples=num_samples, context_tokens=50, max_remaining_tokens=remaining
    )


@pytest.mark.parametrize(
    ("depth", "branching", "width", "nodes"),
    [(4, 1, 1, 4), (1, 3, 3, 3), (3, 2, 2, 2 + 4 + 4), (3, 2, 4, 2 + 4 + 8), (2, 3, 2, 3 + 6), (0, 2, 2, 0)],
)
def test_candidates_of_a_tree_by_hand(depth: int, branching: int, width: int, nodes: int) -> None:
    assert max_tree_nodes(depth, branching, width) == nodes


@pytest.mark.parametrize(
    ("nodes", "depth", "branching", "width"),
    [(5, 5, 1, 1), (10, 3, 2, 2), (11, 3, 2, 3), (13, 3, 2, 4), (14, 3, 2, 4), (8, 4, 2, 2), (16, 4, 3, 3)],
)
def test_the_narrowest_width_that_holds_enough_candidates(
    nodes: int, depth: int, branching: int, width: int
) -> None:
    assert narrowest_width(nodes, depth, branching) == width
    assert max_tree_nodes(depth, branching, width) >= nodes


def test_width_is_bounded_where_no_width_holds_enough() -> None:
    assert narrowest_width(16, 2, 2) <= 16


CHAIN = Budget(num_nodes=4, depth=4, branching=1, width=1, reason="")
TREE = Budget(num_nodes=8, depth=4, branching=2, width=2, reason="")


@pytest.mark.parametrize(
    ("budget", "depth", "nodes"), [(CHAIN, 3, 3), (CHAIN, 1, 1), (TREE, 3, 8), (TREE, 2, 6), (TREE, 1, 2)]
)
def test_cut_to_fewer_levels(budget: Budget, depth: int, nodes: int) -> None:
    cut = clip_depth(budget, depth)
    assert (cut.num_nodes, cut.depth) == (nodes, depth)
    assert (cut.branching, cut.width) == (budget.branching, budget.width)


def test_cut_to_nothing_is_plain_and_no_cut_changes_nothing() -> None:
    assert clip_depth(TREE, 0) is PLAIN
    assert clip_depth(TREE, -1) is PLAIN
    assert clip_depth(TREE, 4) is TREE
    assert clip_depth(PLAIN, 0) is PLAIN


def test_off_never_drafts() -> None:
    assert OffPolicy().plan(state()) is PLAIN
    assert OffPolicy().max_nodes == 0


def test_fixed_repeats_its_tree_and_leaves_room_for_the_bonus_token() -> None:
    policy = FixedPolicy(num_nodes=8, depth=4, branching=2)
    assert policy.max_nodes == 8
    budget = policy.plan(state())
    assert (budget.num_nodes, budget.depth, budget.branching, budget.width) == (8, 4, 2, 2)
    assert policy.plan(state(remaining=5)) == budget
    assert policy.plan(state(remaining=4)).depth == 3
    assert policy.plan(state(remaining=2)).num_nodes == 2
    assert policy.plan(state(remaining=1)).is_plain


def test_a_fixed_chain_is_as_deep_as_it_has_nodes() -> None:
    budget = FixedPolicy(num_nodes=6, depth=2, branching=1).plan(state())
    assert (budget.num_nodes, budget.depth, budget.width) == (6, 6, 1)
    assert FixedPolicy(num_nodes=0, depth=4, branching=2).plan(state()).is_plain


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"policy": "off"}, OffPolicy),
        ({"policy": "fixed", "drafter": "none"}, OffPolicy),
        ({"policy": "fixed"}, FixedPolicy),
        ({"policy": "bandit"}, BanditPolicy),
    ],
)
def test_config_names_the_policy(settings: dict[str, str], kind: type) -> None:
    policy = build_policy(SpeculationConfig.model_validate(settings))
    assert isinstance(policy, kind)
    assert isinstance(policy, DraftPolicy)
