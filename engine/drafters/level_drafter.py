"""Grows a draft level by level: a tree, or a chain, one forward a level over the whole batch.

Children are ranked by the drafter's own `logits / T + g[t]`, the target's noise `g` included: the drafter
guesses the sampled token and not merely a likely one (design 3.1; the chain form is Daliri et al. 2024,
"Coupling without communication and drafter-invariant speculative decoding"). A node's score is the product, along
its path, of the children's estimated acceptance: that of the acceptance model where the policy refines the draft,
else a child's share of the softmax over perturbed scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.decode_records import Budget
from ..attention.backends import Attention
from ..cache.kv_pool import KVPool
from ..decoding.draft_tree import DraftTree, chain, root_only
from ..decoding.noise import Noise
from ..decoding.running_batch import RunningBatch
from ..decoding.sampling_rule import TopK, choose, leader_shares, leaders
from ..model.compute_backend import FusedChain, PoolAttention
from ..model.forward_plan import TreePlan
from ..upload import upload
from .drafter import Drafter
from .refinement import Refinement


class LevelByLevel:
    """A chain's levels, each the best child of the one before: a forward for each."""

    def __init__(
        self,
        forward: Callable[[RunningBatch, Tensor, Tensor | None, Tensor, Tensor | None], Tensor],
        batch: RunningBatch,
        noise: Noise,
        logits: Float[Tensor, "B V"],
        refinement: Refinement | None,
        depth: int,
    ) -> None:
        self._forward = forward
        self._batch = batch
        self._noise = noise
        self._logits = logits
        self._refinement = refinement
        self._index = torch.arange(depth, device=logits.device).expand(len(batch), -1)
        self._tokens: list[Tensor] = []

    def draft(self, begin: int, end: int) -> None:
        """Draft the levels from `begin` on, `end` excluded, and show them to the refinement, if there is one."""
        found = [self._next() for _ in range(begin, end)]
        if self._refinement is not None:
            self._refinement.chain_levels(
                np.concatenate([each.scores for each in found if each is not None], 1),
                np.concatenate([each.logprobs for each in found if each is not None], 1),
            )

    def token_ids(self, count: int) -> Int[Tensor, "B count"]:
        """Return the first levels' tokens."""
        return torch.cat(self._tokens[:count], dim=1)

    def _next(self) -> TopK | None:
        """Draft a level; return its leaders where they are to be scored."""
        batch, drafted = self._batch, len(self._tokens)
        if drafted:
            last, index = self._tokens[-1], self._index[:, :drafted]
            self._logits = self._forward(batch, last, None, index, None)[:, 0]
        level = noise_at_level(len(batch), 1, drafted, self._logits.device)
        logits = self._logits[:, None]
        if self._refinement is None:
            self._tokens.append(choose(logits, self._noise, level, batch.sampling))
            return None
        found = leaders(logits, self._noise, level, batch.sampling, min(2, logits.shape[-1]))
        self._tokens.append(found.token_ids[..., 0])
        return found


class FusedLevels:
    """The same in one call for all levels between two questions."""

    def __init__(
        self,
        fused: FusedChain,
        batch: RunningBatch,
        noise: Noise,
        logits: Float[Tensor, "B V"],
        refinement: Refinement | None,
    ) -> None:
        self._fused = fused
        self._refinement = refinement
        sampling = batch.sampling
        lengths = batch.lengths[: len(batch)]
        self._noise = noise
        fused.start(logits, lengths, noise.buffer, sampling.divisor, sampling.noise_factor)

    def draft(self, begin: int, end: int) -> None:
        """See `LevelByLevel`."""
        self._noise.up_to(end)
        scores, logprobs = self._fused.draft(begin, end)
        if self._refinement is not None:
            self._refinement.chain_levels(scores, logprobs)

    def token_ids(self, count: int) -> Int[Tensor, "B count"]:
        """See `LevelByLevel`."""
        return self._fused.token_ids(count)


@cache
def noise_at_level(batch: int, width: int, level: int, device: torch.device) -> Int[Tensor, "B w"]:
    """The level of noise that a level's nodes choose by; made once, for good."""
    return torch.full((batch, width), level, device=device)


class LevelDrafter(Drafter, ABC):
    """A drafter that computes, with weights that follow the target's.

    Its body says what is behind the root, and behind a level's tokens.
    """

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights of another version, and forget what depends on the old ones. Raises WeightsError."""

    @property
    @abstractmethod
    def pool(self) -> KVPool:
        """Where the levels' keys and values are written."""

    @abstractmethod
    def root_logits(self, batch: RunningBatch) -> Float[Tensor, "B V"]:
        """Catch up with the committed tokens; return the logits behind the root."""

    @abstractmethod
    def forward_level(
        self,
        batch: RunningBatch,
        ids: Int[Tensor, "B n"],
        seen: Bool[Tensor, "B n t"] | None,
        depth: Int[Tensor, "B t"],
        parents: Int[Tensor, "B n"] | None,
    ) -> Float[Tensor, "B n V"]:
        """Run one level's tokens, written behind the committed tokens and the earlier levels.

        Args:
            batch: the running samples.
            ids: of the tokens.
            seen: which of the t columns of all levels so far each of them sees; None: a chain.
            depth: of every column; 0 are the root's children.
            parents: which of the tokens of the level before is each one's parent; None: there is only one.
        """

    @property
    def fused_chain(self) -> FusedChain | None:
        """What drafts chains in few calls; None: nothing does."""
        return None

    def propose(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> DraftTree | None:
        """Catch up with the committed tokens, then grow the tree; see `Drafter.propose`."""
        return self.grow(batch, budget, noise, self.root_logits(batch), refinement)

    def grow(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        logits: Float[Tensor, "B V"],
        refinement: Refinement | None = None,
    ) -> DraftTree:
        """Grow the tree of candidates from the logits behind the root."""
        if budget.branching == 1:
            return self._draft_chain(batch, budget, noise, logits, refinement)
        if noise.words is not None and refinement is None and not batch.sampling.any_filter:
            return self._expand_by_kernels(batch, budget, noise.words, logits)
        return self._expand(batch, budget, noise, logits, refinement)

    def _draft_chain(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        logits: Float[Tensor, "B V"],
        refinement: Refinement | None,
    ) -> DraftTree:
        """Draft the best child of the best child: nothing to sort, so the tree carries no scores."""
        fused, depth = self.fused_chain, budget.depth
        levels: LevelByLevel | FusedLevels
        if fused is not None and not batch.sampling.any_filter:
            levels = FusedLevels(fused, batch, noise, logits, refinement)
        else:
            levels = LevelByLevel(self.forward_level, batch, noise, logits, refinement, depth)
        drafted = 0
        asked_at = depth if refinement is None else min(depth, refinement.levels_to_draft())
        while drafted < asked_at:
            levels.draft(drafted, asked_at)
            drafted = asked_at
            if refinement is not None and drafted < depth:
                asked_at = min(depth, drafted + refinement.levels_to_draft())
        return chain(levels.token_ids(drafted)) if drafted else root_only(len(batch), logits.device)

    def _expand(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        logits: Float[Tensor, "B V"],
        refinement: Refinement | None,
    ) -> DraftTree:
        """Expand `width` nodes a level, `branching` children each; return all candidates by level."""
        live, device = len(batch), logits.device
        frontier_logits = logits[:, None]
        frontier_number = torch.zeros(live, 1, dtype=torch.int64, device=device)
        frontier_score = torch.ones(live, 1, device=device)
        frontier_seen = torch.zeros(live, 1, 0, dtype=torch.bool, device=device)
        depth_of_column = torch.zeros(live, 0, dtype=torch.int64, device=device)
        levels: list[tuple[Tensor, ...]] = []
        offset = 0
        # a wide tree has more columns than nodes: near the end of the cache it stays shallow
        room = self.pool.room_behind(int(batch.lengths[:live].max()))
        asked_at = budget.depth if refinement is None else refinement.levels_to_draft()
        if asked_at == 0:
            return root_only(live, device)
        for level in range(1, budget.depth + 1):
            noise_level = noise_at_level(live, frontier_logits.shape[1], level - 1, device)
            inputs = (frontier_logits, noise, noise_level, batch.sampling)
            if refinement is None:
                ids, share = leader_shares(*inputs, budget.branching)
                score = frontier_score[..., None] * share
            else:
                found = leaders(*inputs, min(budget.branching + 1, logits.shape[-1]))
                ids, estimates = refinement.children(found)
                (score,) = upload([estimates], device)
            score = score.reshape(live, -1)
            ids = ids.reshape(live, -1)
            parent = frontier_number.repeat_interleave(budget.branching, 1)
            draft_slot = torch.full_like(ids, -1)
            levels.append((ids, parent, score, draft_slot))
            columns = depth_of_column.shape[1]
            if level == budget.depth or columns + min(budget.width, score.shape[1]) > room:
                break
            if refinement is not None and level == asked_at:
                asked_at += refinement.levels_to_draft()
                if level == asked_at:
                    break
            best = torch.sort(score, dim=1, descending=True, stable=True).indices[:, : budget.width]
            if refinement is not None:
                refinement.expand(best.cpu().numpy())
            draft_slot.scatter_(1, best, torch.arange(best.shape[1], device=device).expand_as(best) + columns)
            parent_seen = frontier_seen.gather(
                1, (best // budget.branching)[..., None].expand(-1, -1, frontier_seen.shape[2])
            )
            itself = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(live, -1, -1)
            frontier_seen = torch.cat([parent_seen, itself], dim=2)
            depth_of_column = torch.cat([depth_of_column, torch.full_like(best, level - 1)], dim=1)
            frontier_logits = self.forward_level(
                batch, ids.gather(1, best), frontier_seen, depth_of_column, best // budget.branching
            )
            frontier_score = score.gather(1, best)
            frontier_number = best + 1 + offset
            offset += ids.shape[1]
        return _candidates(levels, budget.branching)

    def _expand_by_kernels(
        self, batch: RunningBatch, budget: Budget, words: Int[Tensor, "2 B D"], logits: Float[Tensor, "B V"]
    ) -> DraftTree:
        """Do the same where two kernels a level say what `_expand` says in thirty calls: without a refinement."""
        live, device, sampling = len(batch), logits.device, batch.sampling
        shape = _level_widths(budget, self.pool.room_behind(int(batch.lengths[:live].max())))
        table = _level_table(live, shape, budget.branching, device)
        candidates = torch.empty(3, *table.depth.shape, dtype=torch.int64, device=device)
        scores = torch.empty(table.depth.shape, device=device)
        frontier_logits, frontier, offset = logits[:, None], (None, None, None), 0
        for level, width in enumerate((*shape[1:], 0)):
            given = (frontier_logits, words, sampling.divisor, sampling.noise_factor, level, budget.branching)
            found = torch.ops.rlhfspec.leaders(*given)
            frontier = torch.ops.rlhfspec.grow(*found, *frontier, candidates, scores, offset, width)
            if width:
                (ids, _, parents), _, seen = frontier
                depth = table.column_depth[level]
                frontier_logits = self.forward_level(batch, ids, seen, depth, parents)
            offset += shape[level] * budget.branching
        token_ids, parents, slots = candidates
        return DraftTree(
            token_ids=token_ids,
            parents=parents,
            depth=table.depth,
            rank=table.rank,
            scores=scores,
            draft_slots=slots,
            is_chain=False,
            by_kernels=True,
        )


def _level_widths(budget: Budget, room: int) -> tuple[int, ...]:
    """How many nodes each level expands, the root first, whose columns have room behind the committed tokens."""
    widths = [1]
    while len(widths) < budget.depth:
        width = min(budget.width, widths[-1] * budget.branching)
        if sum(widths[1:]) + width > room:
            break
        widths.append(width)
    return tuple(widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LevelTable:
    """What all trees of one shape have in common."""

    column_depth: list[Int[Tensor, "B t"]]
    "of the columns up to each level; 0 are the root's children"
    depth: Int[Tensor, "B T"]
    rank: Int[Tensor, "B T"]


@cache
def _level_table(batch: int, widths: tuple[int, ...], branching: int, device: torch.device) -> _LevelTable:
    """Made once, for good: recorded steps read it."""
    level = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths))
    depth = (level + 1).repeat_interleave(branching)
    columns = [level[1 : 1 + sum(widths[1 : end + 2])] - 1 for end in range(len(widths) - 1)]
    tables = [depth, torch.arange(len(depth)) % branching + 1, *columns]
    depth, rank, *columns = (each.repeat(batch, 1).to(device) for each in tables)
    return _LevelTable(column_depth=columns, depth=depth, rank=rank)


def level_plan(
    pool: KVPool,
    attention: Attention | PoolAttention,
    batch: RunningBatch,
    ids: Int[Tensor, "B n"],
    seen: Bool[Tensor, "B n t"] | None,
    depth: Int[Tensor, "B t"],
    *,
    lag: int = 0,
) -> tuple[TreePlan, Int[Tensor, "B n"]]:
    """Return where `LevelDrafter.forward_level` writes a level's tokens and what they see, and their positions.

    `lag`: by how many tokens the cells lag behind the committed ones.
    """
    live, n = ids.shape
    base = batch.inputs().lengths - lag if lag else batch.inputs().lengths
    plan = TreePlan(
        pool=pool,
        attention=attention,
        base=base,
        num_tokens=n,
        num_earlier=depth.shape[1] - n,
        seen=seen,
        depth=depth,
        view_tokens=int(batch.lengths[:live].max()) - lag + depth.shape[1],
    )
    # nodes behind a sample's limit are computed and cut off; their positions must still exist
    return plan, (base[:, None] + depth[:, -n:]).clamp(max=batch.tokens.shape[1] - 1)


def _candidates(levels: list[tuple[Tensor, ...]], branching: int) -> DraftTree:
    ids, parents, scores, slots = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    depth = torch.cat([torch.full_like(level[0], d + 1) for d, level in enumerate(levels)], dim=1)
    rank = torch.arange(ids.shape[1], device=ids.device) % branching + 1
    return DraftTree(
        token_ids=ids,
        parents=parents,
        depth=depth,
        rank=rank.expand_as(ids),
        scores=scores,
        draft_slots=slots,
        is_chain=False,
    )
