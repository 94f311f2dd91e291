"""Policies to compare with, which read no measured cost: `off`, `fixed`, and TLT's bandit.

TLT's bucketed epsilon-greedy bandit (arXiv 2511.16665, the adaptive rollout's tuner) learns by trying. Batch sizes
fall into buckets, powers of two; each bucket has its own record of every arm. An arm is a chain depth or
a tree shape. Its reward is what it delivered, tokens over seconds, in its last decode steps. Mostly the best arm is
played, now and then any. Differences from TLT's release: the reward is the goodput itself and not a median acceptance
over the step's seconds; plain decoding is an arm; arms are not tied to batch sizes beforehand.

Chance is a function of seed and decode step, so that a log replays.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

import numpy as np

from ...core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from .draft_policy import DraftPolicy


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


class WithBrought:
    """Another policy, with room for what requests bring while some of them has anything left."""

    def __init__(self, policy: DraftPolicy, *, most: int) -> None:
        """`most`: tokens of a chain."""
        self._policy, self._most = policy, most
        self.max_nodes = max(policy.max_nodes, most)

    def plan(self, state: DecodeState) -> Budget:
        """Return the policy's budget, or a chain where that is plain."""
        budget, room = self._policy.plan(state), min(self._most, state.max_remaining_tokens - 1)
        if not state.num_brought or room < 1:
            return budget
        if not budget.is_plain:
            return replace(budget, look_up=room)
        # nothing is computed beside them
        return replace(PLAIN, look_up=room, reason="drafts that requests bring")

    def observe(self, record: StepRecord) -> None:
        """Let the policy learn from steps that were as it wanted them."""
        if not record.state.num_brought:
            self._policy.observe(record)


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


CHAIN_DEPTHS = (0, 2, 4, 8, 16)
TREES = ((8, 4, 2), (16, 5, 3))
"num_nodes, depth, branching; a tree larger than the limits is left out"
EPSILON = 0.1
"Share of decode steps that play any arm; TLT's."
WINDOW = 300
"Decode steps of one arm in one bucket that count; TLT's server's."

Shape = tuple[int, int, int]


class BanditPolicy:
    """Epsilon-greedy over chains and trees, by batch size."""

    def __init__(
        self, *, max_nodes: int, max_depth: int, seed: int = 0, epsilon: float = EPSILON, window: int = WINDOW
    ) -> None:
        """Make the policy.

        Args:
            max_nodes: most draft nodes verified per sample.
            max_depth: most levels drafted.
            seed: of the exploration.
            epsilon: share of decode steps that explore.
            window: decode steps per arm and bucket that its reward is the average of.
        """
        shapes = [(depth, depth, 1) for depth in CHAIN_DEPTHS]
        shapes += [tree for tree in TREES if tree[0] <= max_nodes and tree[1] <= max_depth]
        arms = [bounded_tree(*shape, "arm", max_nodes, max_depth) for shape in shapes]
        self._arms = {_shape(arm): arm for arm in arms}
        self._seed = seed
        self._epsilon = epsilon
        self._outcomes: dict[tuple[int, Shape], deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=window)
        )
        self.max_nodes = max(arm.num_nodes for arm in arms)

    def plan(self, state: DecodeState) -> Budget:
        """Return an arm not tried yet, else the best or, by chance, any; arms deeper than any response are left out."""
        size = bucket(state.num_samples)
        room = max(state.max_remaining_tokens - 1, 0)
        arms = [arm for arm in self._arms.values() if arm.depth <= room]
        arm, why = self._pick(size, arms, state.decode_step)
        return replace(arm, reason=f"bandit: {size} to {2 * size - 1} samples, {arm.reason}: {why}")

    def observe(self, record: StepRecord) -> None:
        """Credit the arm that was played with the decode step's tokens and seconds."""
        shape = _shape(record.budget)
        if shape in self._arms:
            outcome = (record.num_emitted_tokens, record.step_s)
            self._outcomes[bucket(record.num_samples), shape].append(outcome)

    def _pick(self, size: int, arms: list[Budget], decode_step: int) -> tuple[Budget, str]:
        untried = [arm for arm in arms if not self._outcomes[size, _shape(arm)]]
        if untried:
            return untried[0], "explore, not tried yet"
        random = np.random.default_rng([self._seed, decode_step])
        if random.random() < self._epsilon:
            return arms[int(random.integers(len(arms)))], "explore, by chance"
        goodputs = [self._goodput(size, arm) for arm in arms]
        best = int(np.argmax(goodputs))
        return arms[best], f"exploit, {goodputs[best]:.0f} tokens/s"

    def _goodput(self, size: int, arm: Budget) -> float:
        """Tokens over seconds in the window."""
        outcomes = self._outcomes[size, _shape(arm)]
        tokens, seconds = map(sum, zip(*outcomes, strict=True))
        return tokens / max(seconds, 1e-9)


def bucket(num_samples: int) -> int:
    """Return the largest power of two that is no more than the batch: its bucket's first size."""
    return 1 << (max(num_samples, 1).bit_length() - 1)


def _shape(budget: Budget) -> Shape:
    return budget.num_nodes, budget.depth, budget.branching
