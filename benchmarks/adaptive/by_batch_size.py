"""Rules by batch size alone, which an adaptive policy has to beat: TLT's table, FastGRPO's capacity.

A forward is flat up to some number of tokens. A large batch fills it by itself and drafts little or nothing; a small
one leaves room, and drafts deep. A table from batch sizes to tree shapes (TLT, arXiv 2511.16665, section on the
adaptive drafter), or a fixed number of verified tokens shared among the samples, says so without a measurement.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfspec.core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from rlhfspec.core.errors import ConfigError
from rlhfspec.policies.drafting.baselines import (
    bounded_tree,
    clip_depth,
    max_tree_nodes,
    narrowest_width,
)

Row = tuple[int, int, int, int]
"max_batch, num_nodes, depth, branching"

DEFAULT_TABLE: tuple[Row, ...] = (
    (1, 16, 8, 2),
    (4, 8, 8, 1),
    (20, 4, 4, 1),
    (32, 2, 2, 1),
)
"""TLT's released ranges (1, 2 to 4, 5 to 20, more) and its switch-on rule: nothing is drafted above 32 samples.

The shapes are ours, in proportion to its trees of 64 nodes for GPUs; a lone sample alone affords breadth.
"""


class BatchTablePolicy:
    """The first row whose `max_batch` holds the batch decides; above the last row nothing is drafted."""

    def __init__(self, table: tuple[Row, ...] = DEFAULT_TABLE, *, max_nodes: int, max_depth: int) -> None:
        """Make the policy.

        Args:
            table: rows of max_batch, num_nodes, depth, branching; num_nodes 0 is plain decoding. A chain
                (branching 1) has no more nodes than levels.
            max_nodes: most draft nodes verified per sample; larger rows are cut.
            max_depth: most levels drafted; deeper rows are cut.

        Raises:
            ConfigError: the rows' batch sizes do not ascend.
        """
        sizes = [row[0] for row in table]
        if sizes != sorted(set(sizes)) or min(sizes, default=1) < 1:
            raise ConfigError(f"the batch sizes of a batch table must ascend from 1 or more, got {sizes}")
        self._rows = [
            (
                size,
                bounded_tree(
                    num_nodes, depth, branching, f"batch table: up to {size} samples", max_nodes, max_depth
                ),
            )
            for size, num_nodes, depth, branching in table
        ]
        self._above = replace(PLAIN, reason=f"batch table: more than {max(sizes, default=0)} samples")
        self.max_nodes = max((budget.num_nodes for _, budget in self._rows), default=0)

    def plan(self, state: DecodeState) -> Budget:
        """Return the row's tree, no deeper than the longest remaining response minus the bonus."""
        budget = next((tree for size, tree in self._rows if state.num_samples <= size), self._above)
        cut = clip_depth(budget, state.max_remaining_tokens - 1)
        if cut.is_plain and not budget.is_plain:
            return replace(PLAIN, reason=f"{budget.reason}; one token remains")
        return cut

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: the table looks at the batch alone."""


class CapacityPolicy:
    """Nodes per sample = capacity / samples - 1, bounded by the largest tree: a capacity is a batch's flat part.

    FastGRPO (arXiv 2509.21792), section on concurrency-aware speculation: each of B samples may verify
    floor(capacity / B) tokens, the root included.
    """

    def __init__(self, *, capacity_tokens: int, max_nodes: int, depth: int, branching: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._depth = depth
        self._branching = branching
        self.max_nodes = max_nodes

    def plan(self, state: DecodeState) -> Budget:
        """Return the tree that fits this batch's share of the capacity; plain decoding when none does."""
        share = self._capacity_tokens // max(state.num_samples, 1)
        num_nodes = min(share - 1, self.max_nodes)
        if num_nodes < 1:
            return PLAIN
        branching = min(self._branching, num_nodes)
        depth = num_nodes if branching == 1 else min(self._depth, num_nodes)
        width = narrowest_width(num_nodes, depth, branching)
        num_nodes = min(num_nodes, max_tree_nodes(depth, branching, width))
        budget = Budget(
            num_nodes=num_nodes,
            depth=depth,
            branching=branching,
            width=width,
            reason=f"capacity {self._capacity_tokens} over {state.num_samples} samples",
        )
        return clip_depth(budget, state.max_remaining_tokens - 1)

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: the rule looks at the batch alone."""
