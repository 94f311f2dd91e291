"""Drafts with a small causal LM: a tree, level by level, one forward a level over the whole batch.

Children are ranked by the draft model's own `logits / T + g[t]`, the target's noise `g` included: the drafter
guesses the sampled token and not merely a likely one (design 3.1; the chain form is Daliri et al. 2024,
"Coupling without communication and drafter-invariant speculative decoding"). A node's score is the product, along
its path, of the children's estimated acceptance: that of the acceptance model where the policy refines the draft,
else a child's share of the softmax over perturbed scores.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from core.decode_records import Budget
from engine.attention.visibility import count_up
from engine.cache.kv_pool import KVPool
from engine.decoding.draft_tree import DraftTree, chain, keep, root_only, select_best
from engine.decoding.noise import Noise
from engine.decoding.running_batch import LAST_TOKENS, RunningBatch
from engine.decoding.sampling_rule import leader_shares, leaders
from engine.decoding.verify import Verdict
from engine.drafters.chain_levels import ChainLevels, FusedLevels, LevelByLevel, noise_at_level
from engine.drafters.refinement import Refinement
from engine.model.forward_plan import TreePlan
from engine.model.prefill import fill_committed
from engine.model.prefill_plan import PrefillPiece
from engine.model.runner import ModelRunner
from engine.upload import upload
from engine.weights.causal_lm import CausalLM

MAX_CATCH_UP_TOKENS = LAST_TOKENS
"More missing tokens than this are prefilled sample by sample instead of batched with the root."


class ModelDrafter:
    """A draft model with its own KV pool, slot for slot beside the target's."""

    def __init__(self, runner: ModelRunner, *, max_prefill_tokens: int) -> None:
        self.runner = runner
        self._max_prefill_tokens = max_prefill_tokens
        self._cached = np.zeros(runner.pool.num_slots, dtype=np.int64)
        "committed tokens whose keys and values the draft cache holds"

    @property
    def model(self) -> CausalLM:
        """The draft model."""
        return self.runner.model

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """Start with an empty cache; the next draft catches up."""
        self._cached[slots.start : slots.stop] = 0

    def draft(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        refinement: Refinement | None = None,
    ) -> DraftTree:
        """Catch up with the committed tokens, then expand the tree."""
        logits = self._catch_up(batch)
        if budget.branching == 1:
            tree = self._draft_chain(batch, budget, noise, logits, refinement)
        else:
            tree = self._expand(batch, budget, noise, logits, refinement)
        if refinement is None:
            return select_best(tree, budget.num_nodes)
        return keep(tree, refinement.select()) if tree.num_nodes else tree

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, " B"]:
        """Keep the accepted nodes that were expanded: move them to their dense positions."""
        if tree.is_chain:
            # they are dense
            return verdict.num_accepted.clamp(max=tree.num_in_cache)
        slots = tree.draft_slots.gather(1, (verdict.path[:, 1:] - 1).clamp_(min=0))
        step = count_up(slots.shape[1], slots.device)
        kept = (slots >= 0) & (step < verdict.num_accepted[:, None])
        self.runner.pool.make_dense(batch.inputs().lengths, slots, kept & (slots != step))
        return kept.sum(1)

    def note_kept(self, batch: RunningBatch, num_kept: np.ndarray) -> None:
        """Count them as cached."""
        self._cached[: len(batch)] = batch.lengths[: len(batch)] + num_kept

    def move_slot(self, source: int, target: int) -> None:
        """Follow a sample to its new slot."""
        self.runner.pool.move_slot(source, target, int(self._cached[source]))
        self._cached[target] = self._cached[source]

    def leave(self, slot: int, batch: RunningBatch) -> None:
        """Nothing to do: who comes next begins with an empty cache."""

    def drop(self) -> None:
        """Forget every cached token."""
        self._cached[:] = 0

    @property
    def cache(self) -> KVPool:
        """The draft model's keys and values."""
        return self.runner.pool

    def num_cached_tokens(self, slot: int) -> int:
        """Committed tokens in the draft cache of a slot."""
        return int(self._cached[slot])

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Go on from a cache that was filled elsewhere."""
        self._cached[slot] = num_tokens

    def _catch_up(self, batch: RunningBatch) -> Float[Tensor, "B V"]:
        """Bring every cache up to the root, which included; return the logits behind the root."""
        live = len(batch)
        lengths = batch.lengths[:live]
        missing = lengths - self._cached[:live]
        behind = np.nonzero(missing > min(MAX_CATCH_UP_TOKENS, int(lengths.min())))[0]
        fill_committed(
            self.runner,
            batch.tokens,
            [
                PrefillPiece(slot=int(s), start=int(self._cached[s]), length=int(missing[s]) - 1)
                for s in behind
            ],
            self._max_prefill_tokens,
            cached=self._cached[:live],
        )
        missing[behind] = 1
        count = int(missing.max())
        inputs = batch.inputs()
        ids = inputs.last_tokens[:, -count:]
        base = inputs.lengths - count
        index = count_up(count, base.device)
        plan = TreePlan(
            pool=self.runner.pool,
            attention=self.runner.attention,
            base=base,
            num_tokens=count,
            view_tokens=int(lengths.max()),
        )
        logits = self.runner.logits(ids.reshape(-1), (base[:, None] + index).reshape(-1), plan)
        self._cached[:live] = lengths
        return logits.view(live, count, -1)[:, -1]

    def _draft_chain(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        logits: Float[Tensor, "B V"],
        refinement: Refinement | None,
    ) -> DraftTree:
        """Draft the best child of the best child: nothing to sort, so the tree carries no scores."""
        fused, depth = self.runner.fused_chain, budget.depth
        levels: ChainLevels
        if fused is not None and not batch.sampling.any_filter:
            levels = FusedLevels(fused, batch, noise, logits, refinement)
        else:
            levels = LevelByLevel(self._forward_level, batch, noise, logits, refinement, depth)
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
        live, device = len(batch), self.runner.device
        lengths = batch.inputs().lengths
        frontier_logits = logits[:, None]
        frontier_number = torch.zeros(live, 1, dtype=torch.int64, device=device)
        frontier_score = torch.ones(live, 1, device=device)
        frontier_seen = torch.zeros(live, 1, 0, dtype=torch.bool, device=device)
        depth_of_column = torch.zeros(live, 0, dtype=torch.int64, device=device)
        levels: list[tuple[Tensor, ...]] = []
        offset = 0
        # a wide tree has more columns than nodes: near the end of the cache it stays shallow
        room = self.runner.pool.room_behind(int(batch.lengths[:live].max()))
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
            frontier_logits = self._forward_level(
                batch, ids.gather(1, best), lengths, frontier_seen, depth_of_column
            )
            frontier_score = score.gather(1, best)
            frontier_number = best + 1 + offset
            offset += ids.shape[1]
        return _candidates(levels, budget.branching)

    def _forward_level(
        self, batch: RunningBatch, ids: Tensor, lengths: Tensor, seen: Tensor | None, depth: Tensor
    ) -> Float[Tensor, "B n V"]:
        """Run one level's tokens; they are written behind the committed tokens and earlier levels."""
        live, n = ids.shape
        plan = TreePlan(
            pool=self.runner.pool,
            attention=self.runner.attention,
            base=lengths,
            num_tokens=n,
            num_earlier=depth.shape[1] - n,
            seen=seen,
            depth=depth,
            view_tokens=int(batch.lengths[:live].max()) + depth.shape[1],
        )
        positions = lengths[:, None] + depth[:, -n:]
        last_position = batch.tokens.shape[1] - 1
        logits = self.runner.logits(ids.reshape(-1), positions.clamp(max=last_position).reshape(-1), plan)
        return logits.view(live, n, -1)


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
