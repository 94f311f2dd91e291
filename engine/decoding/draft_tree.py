"""The draft tree: nodes, ancestors, and the choice of the best nodes (design 3.2, phase `select`).

Node 0 is the root, the last committed token; draft nodes are 1..N, parents before children. Tensors of draft
nodes are [B, N] and leave the root out. A dead node has token id DEAD: it is computed and never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention.backends import CHUNK
from . import tree_operators  # noqa: F401 (defines them)

DEAD = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """`N` draft nodes for each of `B` samples."""

    token_ids: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    "node number of the parent: 0 is the root"
    depth: Int[Tensor, "B N"]
    "1 for children of the root"
    rank: Int[Tensor, "B N"]
    "1 for the drafter's first choice among its siblings"
    scores: Float[Tensor, "B N"]
    "estimated probability that the whole path is accepted"
    draft_slots: Int[Tensor, "B N"]
    "where behind the committed tokens the draft cache holds the node; -1 where it does not"
    is_chain: bool
    "node i has parent i - 1 in every sample"
    num_in_cache: int = 0
    "of a chain: its first nodes, which the draft cache holds"
    num_kept: np.ndarray | None = None
    "[B] where samples keep unlike numbers of nodes: those behind are dead and not even computed"
    looked_up: np.ndarray | None = None
    "[B] bool where some were looked up and others computed"
    by_kernels: bool = False
    "grown by the operators of `engine.decoding.tree_operators`, which then do all that is done to it"

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.token_ids.shape[1]

    @property
    def depth_with_root(self) -> Int[Tensor, "B n"]:
        """Depth of the root, 0, and of every draft node."""
        if self.is_chain:
            return _line(len(self.token_ids), self.num_nodes + 1, 0, self.token_ids.device).index
        return torch.cat([self.depth.new_zeros(self.depth.shape[0], 1), self.depth], dim=1)

    @property
    def levels(self) -> Int[Tensor, "B n"]:
        """Whose noise root and nodes choose by: their depth; that of the root where a choice is of no matter."""
        depth = self.depth_with_root
        if self.num_kept is None:
            return depth
        return torch.cat([depth[:, :1], depth[:, 1:].masked_fill(self.token_ids == DEAD, 0)], dim=1)


def chain(
    token_ids: Int[Tensor, "B N"],
    scores: Float[Tensor, "B N"] | None = None,
    *,
    num_in_cache: int | None = None,
) -> DraftTree:
    """Build a chain: each node the only child of the one before.

    Args:
        token_ids: of the nodes.
        scores: by default ones.
        num_in_cache: nodes that the draft cache holds; by default all but the last.
    """
    batch, n = token_ids.shape
    num_in_cache = max(n - 1, 0) if num_in_cache is None else num_in_cache
    line = _line(batch, n, num_in_cache, token_ids.device)
    return DraftTree(
        token_ids=token_ids,
        parents=line.index,
        depth=line.depth,
        rank=line.rank,
        scores=line.scores if scores is None else scores,
        draft_slots=line.draft_slots,
        is_chain=True,
        num_in_cache=num_in_cache,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """What all chains of one length have in common, [B, N] each."""

    index: Tensor
    depth: Tensor
    rank: Tensor
    scores: Tensor
    draft_slots: Tensor


@cache
def _line(batch: int, num_nodes: int, num_in_cache: int, device: torch.device) -> _Line:
    """Made once, a decode step of a few samples is short; and never given back: recorded steps read it."""
    index = torch.arange(num_nodes, device=device).repeat(batch, 1)
    rank = torch.ones_like(index)
    return _Line(
        index=index,
        depth=index + 1,
        rank=rank,
        scores=rank.float(),
        draft_slots=torch.where(index < num_in_cache, index, -1),
    )


def select_best(candidates: DraftTree, num_nodes: int) -> DraftTree:
    """Keep the `num_nodes` best candidates by score, ties to the shallower.

    A child never scores above its parent and stands behind it in the candidates, so a prefix of the stable
    order is closed under parents and lists them first.
    """
    if num_nodes >= candidates.num_nodes:
        return candidates
    if candidates.by_kernels:
        of = candidates
        given = (of.token_ids, of.parents, of.draft_slots, of.depth, of.rank, of.scores)
        (token_ids, parents, depth, rank, slots), scores = torch.ops.rlhfspec.pick(*given, num_nodes)
        return DraftTree(
            token_ids=token_ids,
            parents=parents,
            depth=depth,
            rank=rank,
            scores=scores,
            draft_slots=slots,
            is_chain=False,
            by_kernels=True,
        )
    order = torch.sort(candidates.scores, dim=1, descending=True, stable=True).indices[:, :num_nodes]
    batch, total = candidates.token_ids.shape
    new_number = torch.zeros(batch, total + 1, dtype=torch.int64, device=order.device)
    numbers = torch.arange(1, num_nodes + 1, device=order.device).expand(batch, -1)
    new_number.scatter_(1, order + 1, numbers)
    return DraftTree(
        token_ids=candidates.token_ids.gather(1, order),
        parents=new_number.gather(1, candidates.parents.gather(1, order)),
        depth=candidates.depth.gather(1, order),
        rank=candidates.rank.gather(1, order),
        scores=candidates.scores.gather(1, order),
        draft_slots=candidates.draft_slots.gather(1, order),
        is_chain=False,
    )


def keep(candidates: DraftTree, num_kept: np.ndarray) -> DraftTree:
    """Keep the `num_kept[b]` best candidates of each sample; a chain keeps its head."""
    widest = int(num_kept.max())
    tree = _head(candidates, widest) if candidates.is_chain else select_best(candidates, widest)
    if int(num_kept.min()) == widest:
        return tree
    counts = torch.from_numpy(num_kept).to(tree.token_ids.device)
    behind = torch.arange(widest, device=counts.device) >= counts[:, None]
    return replace(tree, token_ids=tree.token_ids.masked_fill(behind, DEAD), num_kept=num_kept)


def _head(tree: DraftTree, num_nodes: int) -> DraftTree:
    """Cut a chain; what the draft model computed of it stays in the draft cache."""
    if num_nodes >= tree.num_nodes:
        return tree
    return chain(
        tree.token_ids[:, :num_nodes],
        tree.scores[:, :num_nodes],
        num_in_cache=min(num_nodes, tree.num_in_cache),
    )


def ancestors_or_self(tree: DraftTree) -> Bool[Tensor, "B n n"]:
    """Mark, for each of n = N + 1 nodes (root first), itself and its ancestors."""
    batch, n = tree.token_ids.shape[0], tree.num_nodes + 1
    device = tree.token_ids.device
    if tree.is_chain:
        return torch.ones(n, n, dtype=torch.bool, device=device).tril_().expand(batch, n, n)
    if tree.by_kernels:
        return torch.ops.rlhfspec.ancestors(tree.parents)
    reach = torch.eye(n, device=device).repeat(batch, 1, 1)
    reach[:, 1:].scatter_(2, tree.parents[..., None], 1.0)
    for _ in range((n - 1).bit_length()):
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
    return reach > 0


@cache
def root_only(batch: int, device: torch.device) -> DraftTree:
    """Return the empty tree: plain decoding. Made once, for good."""
    ids = torch.empty(batch, 0, dtype=torch.int64, device=device)
    return chain(ids, ids.float())


def drop_split_nodes(tree: DraftTree, base: Int[Tensor, " B"]) -> DraftTree:
    """Kill nodes stored in another reduction chunk than their dense position: they would round differently.

    `base` is the root's position. Node i is stored at base + i and belongs at base + depth; see
    `engine.attention`. Children of a killed node can never be accepted, so they need no care.
    """
    if tree.is_chain:
        return tree
    index = torch.arange(1, tree.num_nodes + 1, device=base.device)
    stored = (base[:, None] + index) // CHUNK
    dense = (base[:, None] + tree.depth) // CHUNK
    return replace(tree, token_ids=tree.token_ids.masked_fill(stored != dense, DEAD))
