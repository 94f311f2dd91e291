"""TLT's table and FastGRPO's capacity by hand: the row of a batch, limits, what remains near the end."""

import pytest

from rlhfspec.benchmarks.adaptive.policies import DEFAULT_TABLE, BatchTablePolicy, CapacityPolicy
from rlhfspec.core.decode_records import Budget, DecodeState
from rlhfspec.core.errors import ConfigError
from rlhfspec.policies.drafting.baselines import max_tree_nodes

TABLE = ((1, 8, 3, 2), (4, 5, 5, 1), (10, 2, 2, 1), (12, 0, 0, 1))


def state(num_samples: int, remaining: int = 100) -> DecodeState:
    return DecodeState(
        decode_step=0, num_samples=num_samples, context_tokens=50, max_remaining_tokens=remaining
    )


def shape(budget: Budget) -> tuple[int, int, int]:
    return budget.num_nodes, budget.depth, budget.branching


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [
        (1, (8, 3, 2)),
        (2, (5, 5, 1)),
        (4, (5, 5, 1)),
        (5, (2, 2, 1)),
        (10, (2, 2, 1)),
        (11, (0, 0, 0)),
        (13, (0, 0, 0)),
    ],
)
def test_the_first_row_that_holds_the_batch_decides(num_samples: int, expected: tuple[int, ...]) -> None:
    policy = BatchTablePolicy(TABLE, max_nodes=16, max_depth=16)
    assert shape(policy.plan(state(num_samples))) == expected
    assert policy.max_nodes == 8


def test_the_reason_names_the_row() -> None:
    policy = BatchTablePolicy(TABLE, max_nodes=16, max_depth=16)
    assert policy.plan(state(3)).reason == "batch table: up to 4 samples, 5 nodes, depth 5, branching 1"
    assert policy.plan(state(12)).reason == "batch table: up to 12 samples, no draft"
    assert policy.plan(state(13)).reason == "batch table: more than 12 samples"


def test_rows_are_cut_to_the_limits() -> None:
    policy = BatchTablePolicy(TABLE, max_nodes=4, max_depth=3)
    # 2 + 4 candidates on two levels hold 4 nodes; a chain has no more nodes than levels
    assert shape(policy.plan(state(1))) == (4, 3, 2)
    assert shape(policy.plan(state(2))) == (3, 3, 1)
    assert policy.max_nodes == 4
    shallow = BatchTablePolicy(TABLE, max_nodes=16, max_depth=1)
    assert shape(shallow.plan(state(1))) == (2, 1, 2)


def test_no_tree_is_deeper_than_the_longest_response_minus_the_bonus() -> None:
    policy = BatchTablePolicy(TABLE, max_nodes=16, max_depth=16)
    assert shape(policy.plan(state(2, remaining=6))) == (5, 5, 1)
    assert shape(policy.plan(state(2, remaining=4))) == (3, 3, 1)
    assert shape(policy.plan(state(1, remaining=3))) == (6, 2, 2)
    last = policy.plan(state(2, remaining=1))
    assert last.is_plain
    assert last.reason.endswith("one token remains")


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("max_depth", [1, 3, 16])
def test_default_trees_hold_their_nodes_and_larger_batches_draft_no_more(
    max_nodes: int, max_depth: int
) -> None:
    policy = BatchTablePolicy(max_nodes=max_nodes, max_depth=max_depth)
    budgets = [policy.plan(state(num_samples)) for num_samples in range(1, 40)]
    assert max(budget.num_nodes for budget in budgets) == policy.max_nodes <= max_nodes
    assert all(budget.depth <= max_depth and not budget.refined for budget in budgets)
    drafts = [budget for budget in budgets if not budget.is_plain]
    assert len(drafts) == DEFAULT_TABLE[-1][0]
    assert all(b.num_nodes <= max_tree_nodes(b.depth, b.branching, b.width) for b in drafts)
    nodes = [budget.num_nodes for budget in budgets]
    assert nodes == sorted(nodes, reverse=True)


@pytest.mark.parametrize(
    "table", [((4, 2, 2, 1), (2, 4, 4, 1)), ((2, 2, 2, 1), (2, 4, 4, 1)), ((0, 2, 2, 1),)]
)
def test_batch_sizes_must_ascend(table: tuple[tuple[int, int, int, int], ...]) -> None:
    with pytest.raises(ConfigError, match="ascend"):
        BatchTablePolicy(table, max_nodes=8, max_depth=8)


@pytest.mark.parametrize(
    ("num_samples", "nodes"), [(1, 8), (2, 8), (3, 7), (4, 5), (6, 3), (8, 2), (12, 1), (13, 0), (50, 0)]
)
def test_capacity_shares_its_tokens_among_the_samples(num_samples: int, nodes: int) -> None:
    policy = CapacityPolicy(capacity_tokens=24, max_nodes=8, depth=4, branching=2)
    budget = policy.plan(state(num_samples))
    assert budget.num_nodes == nodes
    assert budget.is_plain or num_samples * (budget.num_nodes + 1) <= 24
    assert budget.is_plain or budget.num_nodes <= max_tree_nodes(budget.depth, budget.branching, budget.width)


def test_capacity_stops_at_the_last_token() -> None:
    policy = CapacityPolicy(capacity_tokens=24, max_nodes=8, depth=4, branching=1)
    assert policy.plan(state(1, remaining=3)).num_nodes == 2
    assert policy.plan(state(1, remaining=1)).is_plain
