"""Constant budgets: `off` (plain decoding) and `fixed` (one tree shape for every decode step)."""

from __future__ import annotations

from dataclasses import replace

from rlhfspec.core.decode_records import PLAIN, Budget, DecodeState, StepRecord


class OffPolicy:
    """Never drafts: plain decoding, the baseline of every comparison."""

    max_nodes = 0

    def plan(self, state: DecodeState) -> Budget:
        """Return the empty budget."""
        return PLAIN

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""


class FixedPolicy:
    """Verifies the same number of nodes each decode step, cut where fewer tokens remain to be made.

    `branching` 1 makes a chain of `num_nodes`; more offers that many children to each expanded node and
    keeps the best `num_nodes` of the tree.
    """

    def __init__(self, *, num_nodes: int, depth: int, branching: int) -> None:
        depth = num_nodes if branching == 1 else min(depth, num_nodes)
        if branching > 1:
            num_nodes = min(num_nodes, max_tree_nodes(depth, branching, num_nodes))
        self._tree = PLAIN
        if num_nodes > 0:
            self._tree = Budget(
                num_nodes=num_nodes,
                depth=depth,
                branching=branching,
                width=narrowest_width(num_nodes, depth, branching),
                reason=f"fixed: {num_nodes} nodes, depth {depth}, branching {branching}",
            )

    @property
    def max_nodes(self) -> int:
        """The constant number of nodes."""
        return self._tree.num_nodes

    def plan(self, state: DecodeState) -> Budget:
        """Return the constant budget, no deeper than the longest remaining response minus the bonus."""
        return clip_depth(self._tree, state.max_remaining_tokens - 1)

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""


def clip_depth(budget: Budget, max_depth: int) -> Budget:
    """Cut a budget to `max_depth` levels; nodes beyond what the levels can hold are dropped."""
    if budget.is_plain or max_depth >= budget.depth:
        return budget
    if max_depth <= 0:
        return PLAIN
    num_nodes = min(budget.num_nodes, max_tree_nodes(max_depth, budget.branching, budget.width))
    return Budget(
        num_nodes=num_nodes,
        depth=max_depth,
        branching=budget.branching,
        width=budget.width,
        reason=f"{budget.reason}; cut to depth {max_depth}, fewer tokens remain",
    )


def max_tree_nodes(depth: int, branching: int, width: int) -> int:
    """Number of candidate nodes when `width` nodes a level each offer `branching` children."""
    total, frontier = 0, 1
    for _ in range(depth):
        children = frontier * branching
        total += children
        frontier = min(width, children)
    return total


def narrowest_width(num_nodes: int, depth: int, branching: int) -> int:
    """Return the fewest nodes to expand a level so that `num_nodes` candidates exist."""
    if branching == 1:
        return 1
    width = branching
    while width < num_nodes and max_tree_nodes(depth, branching, width) < num_nodes:
        width += 1
    return width


def bounded_tree(
    num_nodes: int, depth: int, branching: int, reason: str, max_nodes: int, max_depth: int
) -> Budget:
    """Return a tree as near to the asked one as the limits allow, plain decoding for none; its shape joins `reason`."""
    num_nodes = min(num_nodes, max_nodes)
    depth = min(depth, max_depth, num_nodes)
    if depth < 1:
        return replace(PLAIN, reason=f"{reason}, no draft")
    num_nodes = min(num_nodes, max_tree_nodes(depth, branching, num_nodes))
    return Budget(
        num_nodes=num_nodes,
        depth=depth,
        branching=branching,
        width=narrowest_width(num_nodes, depth, branching),
        reason=f"{reason}, {num_nodes} nodes, depth {depth}, branching {branching}",
    )
