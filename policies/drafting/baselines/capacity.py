"""The capacity rule: share a fixed number of verified tokens among the live samples.

Source: FastGRPO (arXiv 2509.21792), section on concurrency-aware speculation. With `B` live samples
and a capacity of `C` tokens (the batch at which a target forward leaves its flat part), each sample may
verify `floor(C / B)` tokens, the root included. Four lines, no fitting: a baseline for adaptive policies.
"""

from __future__ import annotations

from core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from policies.drafting.baselines.fixed import clip_depth, max_tree_nodes, narrowest_width


class CapacityPolicy:
    """Nodes per sample = capacity / samples - 1, bounded by the largest tree."""

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
