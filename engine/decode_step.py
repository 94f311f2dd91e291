"""One decode step of tree speculative decoding, top to bottom (design 3.1, 3.2; RLHFSpec, arXiv 2512.04752).

    noise -> draft -> target forward over root and nodes -> rule at every node -> accept a path
          -> make the path dense in the caches -> log-probabilities of what is emitted

With an empty tree the same lines are plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.decode_records import Budget
from .attention.packing import RaggedRows
from .attention.visibility import count_up
from .decoding.answers import Answers, WholeAnswers
from .decoding.draft_tree import DraftTree, ancestors_or_self, drop_split_nodes, root_only
from .decoding.noise import Noise
from .decoding.running_batch import RunningBatch
from .decoding.step_phases import Phases
from .decoding.verify import verify
from .drafters.drafter import Drafter
from .drafters.refinement import Refinement
from .group.split_answers import Wanted, split_answers
from .model.forward_plan import TreePlan
from .model.runner import ModelRunner


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
    num_accepted_looked_up: int
    "beside a drafter that computes"
    draft_s: float
    verify_s: float
    accept_s: float
    recording_s: float = 0.0
    "beside them, of a shape's first step (`engine.recorded_step`): no cost model learns from it"
    has_next: bool = False
    "whether the next step was begun: in vain, where a sample comes in before it is read"


DecodeStep = Callable[
    [ModelRunner, Drafter | None, RunningBatch, Budget, Callable[[], float], Refinement | None, bool],
    StepOutput,
]
"`decode_step`, or what does the same by recordings (`engine.recorded_step`)."


@torch.inference_mode()
def decode_step(
    runner: ModelRunner,
    drafter: Drafter | None,
    batch: RunningBatch,
    budget: Budget,
    clock: Callable[[], float],
    refinement: Refinement | None = None,
    may_go_on: bool = False,
) -> StepOutput:
    """Decode one step for the running batch; the caches follow, the committed tokens are the caller's.

    `refinement` asks the law while the draft grows; without it the budget alone decides. `may_go_on`: nobody is to come
    in behind it, so that recordings may begin the next.
    """
    phases = Phases(clock, runner.device)
    # the step's one copy to the device, unless the policy looks at the draft
    lengths = batch.inputs(budget.deepest + 1).lengths
    live = len(batch)
    noise = batch.noise(budget.deepest + 1, runner.vocab_size)
    tree = None
    if drafter is not None and not budget.is_plain:
        tree = drafter.draft(batch, budget, noise, refinement)
    if tree is None:
        tree = root_only(live, lengths.device)
    if runner.rounds_by_chunk:
        tree = drop_split_nodes(tree, lengths - 1)
    phases.mark()

    decided, hidden = forward_and_accept(runner, drafter, batch, budget, noise, tree, phases.mark, refinement)
    # on a GPU these copies are under way until the stream has been waited for
    on_host = [tensor.to("cpu", non_blocking=True).numpy() for tensor in decided]
    output = concluded(drafter, batch, budget, on_host, phases.finish(), looked_up=tree.looked_up)
    if runner.taps is not None and hidden is not None:
        runner.taps.note_verified(batch, hidden, output.token_ids, output.num_accepted)
    return output


def concluded(
    drafter: Drafter | None,
    batch: RunningBatch,
    budget: Budget,
    on_host: Sequence[np.ndarray],
    seconds: Sequence[float],
    *,
    looked_up: np.ndarray | None = None,
) -> StepOutput:
    """Say what a step has decided (`forward_and_accept`), and let the drafter learn. `looked_up`: drafts that were."""
    draft_s, verify_s, accept_s = seconds
    token_ids, policy, sampling, num_accepted, num_drafted, rank2_plus, *num_kept = on_host
    if drafter is not None and not budget.is_plain:
        drafter.learn(batch, token_ids, num_accepted, num_kept[0] if num_kept else None)
    return StepOutput(
        token_ids=token_ids,
        policy_logprobs=policy,
        sampling_logprobs=sampling,
        num_accepted=num_accepted,
        num_draft_tokens=int(num_drafted.sum()),
        num_accepted_rank2_plus=int(rank2_plus.sum()),
        num_accepted_looked_up=0 if looked_up is None else int(num_accepted[looked_up].sum()),
        draft_s=draft_s,
        verify_s=verify_s,
        accept_s=accept_s,
    )


def forward_and_accept(
    runner: ModelRunner,
    drafter: Drafter | None,
    batch: RunningBatch,
    budget: Budget,
    noise: Noise,
    tree: DraftTree,
    mark: Callable[[], None],
    refinement: Refinement | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Verify a draft: forward, choices, accepted path, dense caches, log-probabilities. `mark` ends the forward.

    Returns:
        Tokens and two log-probabilities [B, D]; accepted, drafted and accepted of rank 2 and beyond [B]; where there
        was a draft that a drafter keeps in a cache, how many of its nodes it keeps [B]. And the path's hidden states.
    """
    lengths = batch.inputs().lengths
    ancestors = None if tree.is_chain else ancestors_or_self(tree)
    # a node at depth d chooses the token of depth d + 1
    answers, hidden = _target_answers(
        runner, batch, tree, ancestors, lengths - 1, noise, budget.deepest + 1, mark
    )
    verdict = verify(answers.token_ids, tree, ancestors, min(budget.deepest, tree.num_nodes))
    if refinement is not None:
        refinement.conclude(tree, verdict, batch.requests)
    if not tree.is_chain:
        step = count_up(verdict.path.shape[1], runner.device)
        out_of_place = (step <= verdict.num_accepted[:, None]) & (verdict.path != step)
        runner.pool.make_dense(lengths - 1, verdict.path, out_of_place)
        if hidden is not None:
            hidden = hidden.gather(1, verdict.path[..., None].expand(-1, -1, hidden.shape[-1]))
    policy, sampling = answers.logprobs(verdict, is_chain=tree.is_chain)
    kept_nodes = drafter.commit(batch, tree, verdict) if drafter is not None and tree.num_nodes else None
    decided = (verdict.token_ids, policy, sampling, verdict.num_accepted, (tree.token_ids >= 0).sum(1))
    kept = () if kept_nodes is None else (kept_nodes,)
    return (*decided, verdict.num_accepted_rank2_plus, *kept), hidden


def _target_answers(
    runner: ModelRunner,
    batch: RunningBatch,
    tree: DraftTree,
    ancestors: Tensor | None,
    base: Tensor,
    noise: Noise,
    num_levels: int,
    mark: Callable[[], None],
) -> tuple[Answers, Tensor | None]:
    """Run root and nodes of every sample; return its answers, and hidden states [B, n, k H] where tapped."""
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
    ids = batch.inputs().last_tokens[:, -1:]
    if n > 1:
        # dead nodes are computed, as whatever token
        ids = torch.cat([ids, tree.token_ids.clamp(min=0)], dim=1)
    # nodes behind a sample's limit are computed and cut off; their positions must still exist
    positions = (base[:, None] + depth).clamp_(max=batch.tokens.shape[1] - 1)
    ids, positions = ids.reshape(-1), positions.reshape(-1)
    if ragged is not None:
        ids, positions = ragged.pack(ids), ragged.pack(positions)

    def by_sample(rows: Tensor) -> Tensor:
        return (rows if ragged is None else ragged.unpack(rows)).view(live, n, -1)

    if runner.ranks is None or batch.sampling.any_filter:
        logits = by_sample(runner.logits(ids, positions, plan))
        mark()
        answers: Answers = WholeAnswers(logits, noise, tree.levels, batch.sampling)
    else:
        answers = split_answers(runner, ids, positions, plan, Wanted.of(batch, tree.levels, num_levels))
        mark()
    return answers, None if runner.taps is None else by_sample(runner.taps.rows(len(ids)))
