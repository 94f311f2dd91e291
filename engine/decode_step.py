"""One decode step of tree speculative decoding, top to bottom (design 3.1, 3.2; RLHFSpec, arXiv 2512.04752).

    noise -> draft -> target forward over root and nodes -> rule at every node -> accept a path
          -> make the path dense in the caches -> log-probabilities of what is emitted

With an empty tree the same lines are plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.records import Budget
from engine.batch import RunningBatch
from engine.drafters.base import Drafter
from engine.forward_plan import TreePlan
from engine.packing import RaggedRows
from engine.refinement import Refinement
from engine.rule import emitted_logprobs, perturb, scale
from engine.runner import ModelRunner
from engine.tree import DraftTree, ancestors_or_self, drop_split_nodes, root_only
from engine.verify import Verdict, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one decode step produced, on the host. Row b is the sample in slot b."""

    token_ids: np.ndarray
    "[B, D] int64; entries up to num_accepted[b] are emitted"
    policy_logprobs: np.ndarray
    sampling_logprobs: np.ndarray
    num_accepted: np.ndarray
    "[B]; one more token than this is emitted"
    num_draft_tokens: int
    num_accepted_rank2_plus: int
    draft_s: float
    verify_s: float
    accept_s: float


@torch.inference_mode()
def decode_step(
    runner: ModelRunner,
    drafter: Drafter | None,
    batch: RunningBatch,
    budget: Budget,
    clock: Callable[[], float],
    refinement: Refinement | None = None,
) -> StepOutput:
    """Decode one step for the running batch; the caches follow, the committed tokens are the caller's.

    `refinement` asks the policy while the draft grows; without it the budget alone decides.
    """
    started = clock()
    lengths = batch.lengths_tensor()
    live = len(batch)
    noise = batch.noise(budget.depth + 1, runner.vocab_size)
    tree = None
    if drafter is not None and not budget.is_plain:
        tree = drafter.draft(batch, budget, noise, refinement)
    if tree is None:
        tree = root_only(live, lengths.device)
    tree = drop_split_nodes(tree, lengths - 1)
    drafted = clock()

    ancestors = None if tree.is_chain else ancestors_or_self(tree)
    logits = _target_logits(runner, batch, tree, ancestors, lengths - 1)
    verified = clock()

    scaled = scale(logits, batch.sampling)
    choices = perturb(scaled, _noise_of_nodes(noise, tree), batch.sampling).argmax(-1)
    verdict = verify(choices, tree, ancestors, min(budget.depth, tree.num_nodes))
    if refinement is not None:
        refinement.conclude(tree, verdict, batch.requests)
    _commit_path(runner, verdict, tree, lengths - 1)
    if drafter is not None and tree.num_nodes:
        drafter.commit(batch, tree, verdict, None)
    rows = scaled
    if not tree.is_chain:
        rows = scaled.gather(1, verdict.path[..., None].expand(-1, -1, scaled.shape[-1]))
    policy, sampling = emitted_logprobs(rows, verdict.token_ids, batch.sampling)
    output = StepOutput(
        token_ids=verdict.token_ids.cpu().numpy(),
        policy_logprobs=policy.cpu().numpy(),
        sampling_logprobs=sampling.cpu().numpy(),
        num_accepted=verdict.num_accepted.cpu().numpy(),
        num_draft_tokens=int((tree.token_ids >= 0).sum()) if tree.num_nodes else 0,
        num_accepted_rank2_plus=int(verdict.num_accepted_rank2_plus),
        draft_s=drafted - started,
        verify_s=verified - drafted,
        accept_s=clock() - verified,
    )
    return output


def _target_logits(
    runner: ModelRunner, batch: RunningBatch, tree: DraftTree, ancestors: Tensor | None, base: Tensor
) -> Tensor:
    """Run root and nodes of every sample; return logits [B, n, V]."""
    live, n = len(batch), tree.num_nodes + 1
    depth = tree.depth_with_root
    ragged = None if tree.num_kept is None else RaggedRows.of(tree.num_kept + 1, base.device)
    plan = TreePlan(
        pool=runner.pool,
        attention=runner.attention,
        base=base,
        num_tokens=n,
        seen=ancestors,
        depth=None if ancestors is None else depth,
        view_tokens=int(batch.lengths[:live].max()) + n - 1,
        ragged=ragged,
    )
    ids = torch.cat([batch.last_tokens(1), tree.token_ids.clamp(min=0)], dim=1)
    # nodes behind a sample's limit are computed and cut off; their positions must still exist
    positions = (base[:, None] + depth).clamp_(max=batch.tokens.shape[1] - 1)
    ids, positions = ids.reshape(-1), positions.reshape(-1)
    if ragged is None:
        return runner.logits(ids, positions, plan).view(live, n, -1)
    return ragged.unpack(runner.logits(ragged.pack(ids), ragged.pack(positions), plan)).view(live, n, -1)


def _noise_of_nodes(noise: Tensor, tree: DraftTree) -> Tensor:
    """Return each node's noise [B, n, V]: a node at depth d chooses the token of depth d + 1."""
    if tree.is_chain:
        return noise[:, : tree.num_nodes + 1]
    return noise.gather(1, tree.depth_with_root[..., None].expand(-1, -1, noise.shape[-1]))


def _commit_path(runner: ModelRunner, verdict: Verdict, tree: DraftTree, base: Tensor) -> None:
    """Move the accepted nodes' keys and values to their dense positions behind the root."""
    if tree.is_chain:
        return
    step = torch.arange(verdict.path.shape[1], device=base.device)
    out_of_place = (step <= verdict.num_accepted[:, None]) & (verdict.path != step)
    slots, level = torch.nonzero(out_of_place, as_tuple=True)
    if len(slots):
        root = base[slots]
        runner.pool.move_tokens(slots, root + verdict.path[slots, level], root + level)
