"""The sampling rule over a split vocabulary, without gathering logits.

The noise is a function of key, position and token id, so each rank finds the best of its own ids; the ranks exchange
one (score, id, logit) of every node and the logs of their parts' sums of exponentials. Ties go to the smaller id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..decoding.logprobs import normalizer, part_sums
from ..decoding.noise import NoiseSource
from ..decoding.running_batch import RunningBatch
from ..decoding.verify import Verdict
from ..model.forward_plan import ForwardPlan, TreePlan
from ..model.runner import ModelRunner
from ..parts import PARTS, Share, part_width
from ..upload import upload

SCORE, TOKEN_ID, LOGIT, SUMS = 0, 1, 2, 3
"Columns of what a rank says of a node; in float64, which holds float32 and ids."


class Wanted(NamedTuple):
    """What the rule needs beside logits, on the device."""

    words: Int[Tensor, "2 B D"]
    "two hash words of each (sample, level), int32"
    levels: Int[Tensor, "B n"]
    "of each node's noise"
    divisors: Float[Tensor, " B"]
    "of the logits"
    factors: Float[Tensor, " B"]
    "of the noise; 0 where sampling is greedy"

    @staticmethod
    def of(batch: RunningBatch, levels: Int[Tensor, "B n"], num_levels: int) -> Wanted:
        """For the running samples and the levels of their nodes, of which there are at most so many."""
        (words,) = upload([batch.host_words(num_levels)], batch.device)
        return Wanted(words, levels, batch.sampling.divisor, batch.sampling.noise_factor)


def split_answers(
    runner: ModelRunner, ids: Tensor, positions: Tensor, plan: ForwardPlan, wanted: Wanted
) -> SplitAnswers:
    """Run the tokens of a plan's trees over all ranks and choose a token at every node. All ranks call it at once."""
    assert runner.ranks is not None and isinstance(plan, TreePlan)
    rows = runner.own_logits(ids, positions, plan, *wanted)
    if plan.ragged is not None:
        rows = plan.ragged.unpack(rows)
    logits = rows.view(len(plan.base), plan.num_tokens, -1)
    mine = of_this_rank(logits, wanted, runner.backend.noise, runner.ranks.share, runner.vocab_size)
    return SplitAnswers(runner.ranks.exchange(mine), wanted.factors)


def of_this_rank(
    logits: Float[Tensor, "B n W"], wanted: Wanted, source: NoiseSource, share: Share, vocab_size: int
) -> Float[Tensor, "B n columns"]:
    """Return the best of this rank's token ids for every node, and its part of the normalizer."""
    ids, (words, levels, divisors, factors) = share.of_vocabulary(vocab_size), wanted
    own = torch.arange(ids.start, ids.stop, device=logits.device)
    noise = source.of_words(words, vocab_size).of_ids(own)
    scaled = logits.float() / divisors[:, None, None]
    found = noise.leaders(logits, levels, divisors, factors, count=1, share=0.0)
    if found is None:
        scores, best = (scaled + noise.of_levels(levels) * factors[:, None, None]).max(-1, keepdim=True)
    else:
        best, scores = found[0], torch.from_numpy(found[1])
    sums = part_sums(scaled.flatten(0, 1), part_width(vocab_size)).view(*logits.shape[:2], -1)
    mine = logits.new_full((*logits.shape[:2], SUMS + PARTS // share.ranks), -torch.inf, dtype=torch.float64)
    mine[..., SCORE : SCORE + 1] = scores
    mine[..., TOKEN_ID : TOKEN_ID + 1] = best + ids.start
    mine[..., LOGIT : LOGIT + 1] = scaled.gather(-1, best)
    mine[..., SUMS : SUMS + sums.shape[-1]] = sums
    return mine


class SplitAnswers:
    """The target's token at every node, from what the ranks say. See `engine.decoding.answers.Answers`."""

    def __init__(self, said: Float[Tensor, "ranks B n columns"], factors: Float[Tensor, " B"]) -> None:
        """`factors`: of the noise; 0 where sampling is greedy."""
        # the first of equal ones, which has the smaller ids
        first = said[..., SCORE].argmax(0)
        chosen = said.gather(0, first[None, ..., None].expand(1, -1, -1, said.shape[-1]))[0]
        self.token_ids: Int[Tensor, "B n"] = chosen[..., TOKEN_ID].long()
        nodes = self.token_ids.shape
        sums = said[..., SUMS:].movedim(0, 2).float().reshape(nodes.numel(), -1)
        self._logprobs = chosen[..., LOGIT].float() - normalizer(sums).view(nodes)
        self._factors = factors

    def logprobs(self, verdict: Verdict, *, is_chain: bool) -> tuple[Tensor, Tensor]:
        """See `Answers.logprobs`."""
        policy = self._logprobs if is_chain else self._logprobs.gather(1, verdict.path)
        return policy, policy * self._factors[:, None]
