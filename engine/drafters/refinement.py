"""A draft refined while it grows (design 3.2): scores from the acceptance model, decisions from the law.

    what is looked up:  a whole chain and its path acceptance -> is it enough?
    level by level:     children and their estimated path acceptance -> another level?
    at the end:         which candidates of which proposal are verified

Drafters call it; the law sees numpy arrays on the host. What was shown and decided is kept for the
step's record, so that a log replays. On a device that must not wait for the host, budgets are not refined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int
from torch import Tensor

from ...core.decode_records import Budget, DraftLog, LookUpLog
from ...core.records import SampleRequest
from ...policies.drafting.draft_policy import DraftLaw, Proposal
from ...profiles.acceptance import AcceptanceModel, Coefficients, acceptance
from ..decoding.draft_tree import DraftTree
from ..decoding.sampling_rule import TopK
from ..decoding.verify import Verdict

FARTHEST = 50.0
"Largest margin and least log-probability that the model is shown, nats."


class Refinement:
    """One decode step's conversation between drafters and law."""

    def __init__(
        self,
        law: DraftLaw,
        scorer: Scorer,
        budget: Budget,
        remaining: np.ndarray,
        clock: Callable[[], float],
    ) -> None:
        """Start a step.

        Args:
            law: decides.
            scorer: estimates.
            budget: the law's, of this step.
            remaining: tokens each sample may still get, [B]; deeper nodes cannot count.
            clock: seconds.
        """
        self.seconds = 0.0
        self.clock = clock
        self._law = law
        self._scorer = scorer
        self._budget = budget
        self._remaining = remaining
        self._shortest = int(remaining.min())
        self._proposals: list[Proposal] = []
        "whole ones: looked up"
        self._counts: list[np.ndarray] = []
        "[B] nodes of each proposal that are verified, once that is chosen"
        self._blocks: list[np.ndarray] = []
        self._sizes: tuple[int, ...] = ()
        self._last = self._frontier = np.ones((len(remaining), 1), dtype=np.float32)

    def levels_to_draft(self) -> int:
        """Ask the law how many levels to draft before it is asked again."""
        started = self.clock()
        answer = self._law.deepen(len(self._sizes), self._last)
        self.seconds += self.clock() - started
        return answer

    def children(self, found: TopK) -> tuple[Int[Tensor, "B w b"], np.ndarray]:
        """Return the best children of every frontier node, and their path scores, float32 [B, w * b].

        There is one leader more than children: by how much they lead is scored.
        """
        started = self.clock()
        level = len(self._sizes) + 1
        share = self._scorer.acceptance(found.scores, found.logprobs, (level,))
        path = (share * self._frontier[..., None]).reshape(len(share), -1)
        if level >= self._shortest:
            path[self._remaining <= level] = 0.0
        self._add(path, (path.shape[1],))
        self._last = path
        self.seconds += self.clock() - started
        return found.token_ids.narrow(-1, 0, share.shape[-1]), path

    def expand(self, candidates: np.ndarray) -> None:
        """The next level's parents are these of this level's candidates, [B, w]."""
        self._frontier = np.take_along_axis(self._last, candidates, axis=1)

    def chain_levels(self, scores: np.ndarray, logprobs: np.ndarray) -> None:
        """Score a chain's next levels together: calls cost more than numbers.

        Both are [B, levels, 2], of the best token and the one that it leads (`engine.decoding.sampling_rule.TopK`).
        """
        started = self.clock()
        before = len(self._sizes)
        share = self._scorer.acceptance(
            scores, logprobs, tuple(range(before + 1, before + 1 + scores.shape[1]))
        )
        path = np.multiply.accumulate(share[..., 0], axis=1)
        path *= self._frontier
        count = path.shape[1]
        if before + count >= self._shortest:
            path[self._remaining[:, None] <= np.arange(before + 1, before + 1 + count)] = 0.0
        self._add(path, (1,) * count)
        self._last = self._frontier = path[:, -1:]
        self.seconds += self.clock() - started

    def offer(self, path: np.ndarray, seconds: float = 0.0) -> None:
        """Take the path scores of chains that were drafted at once in so many seconds, float32 [B, levels]."""
        started = self.clock()
        levels = np.arange(1, path.shape[1] + 1)
        path = np.where(levels < self._remaining[:, None], path, np.float32(0.0))
        self._proposals.append(Proposal(path, (1,) * path.shape[1], seconds))
        self.seconds += self.clock() - started

    def is_enough(self) -> bool:
        """Ask the law whether nothing is to be computed beside the chains that were offered."""
        started = self.clock()
        enough = self._law.is_enough(self._proposals[0])
        self.seconds += self.clock() - started
        return enough

    @property
    def has_scores(self) -> bool:
        """A drafter has shown some."""
        return bool(self._proposals or self._sizes)

    def choose(self) -> list[np.ndarray]:
        """Ask the law how many candidates of each proposal to verify, [B] each: those computed are the last."""
        started = self.clock()
        if self._sizes:
            self._proposals.append(Proposal(self._scores, self._sizes))
        self._counts = self._law.choose(self._proposals)
        self.seconds += self.clock() - started
        return self._counts

    def _add(self, scores: np.ndarray, sizes: tuple[int, ...]) -> None:
        self._blocks.append(scores)
        self._sizes += sizes

    def conclude(self, tree: DraftTree, verdict: Verdict, requests: Sequence[SampleRequest]) -> None:
        """Pass the outcome on to the scorer; `requests` are the batch's."""
        if self._counts:
            self._scorer.concluded(tree, verdict, requests)

    def log(self, num_accepted: np.ndarray) -> DraftLog | None:
        """Return what happened, None when nothing was chosen."""
        if not self._counts:
            return None
        shown, look_up = list(self._proposals), None
        if self._budget.look_up:
            beside = shown.pop(0)
            look_up = LookUpLog(scores=beside.scores, used=self._counts[0] > 0, seconds=beside.seconds)
        scores, sizes, _ = shown[0] if shown else Proposal(self._scores, ())
        return DraftLog(
            scores=scores,
            level_sizes=sizes,
            num_nodes=sum(self._counts[1:], start=self._counts[0]),
            num_accepted=num_accepted,
            look_up=look_up,
        )

    @property
    def _scores(self) -> np.ndarray:
        """All computed candidates' scores, [B, C], level by level."""
        if len(self._blocks) == 1:
            return self._blocks[0]
        none = np.zeros((len(self._remaining), 0), dtype=np.float32)
        return np.concatenate(self._blocks, axis=1) if self._blocks else none


class Scorer:
    """The acceptance model on what the draft model says. Small arrays on the host: numpy costs least."""

    def __init__(self, model: AcceptanceModel) -> None:
        self.model = model
        self._coefficients: dict[tuple[tuple[int, ...], int], Coefficients] = {}

    def acceptance(self, scores: np.ndarray, logprobs: np.ndarray, levels: tuple[int, ...]) -> np.ndarray:
        """Return the conditional acceptance, [B, w, b], of all leaders of a node but the last, its children.

        Args:
            scores: leaders' perturbed scores, best first, [B, w, b + 1].
            logprobs: of the leaders, likewise.
            levels: of all w nodes, or of each: a chain's levels side by side.
        """
        count = scores.shape[-1] - 1
        logprob = logprobs[..., :count]
        margin = scores[..., :1] - scores[..., 1:]
        if count > 1:
            # rank 1 leads the second, the others trail the first
            margin = np.concatenate([margin[..., :1], margin[..., :-1]], axis=-1)
        # what a filter dropped is infinitely far
        margin, logprob = np.minimum(margin, FARTHEST), np.maximum(logprob, -FARTHEST)
        self.saw(margin, logprob)
        return acceptance(margin, logprob, self._coefficients_of(levels, count))

    def saw(self, margin: np.ndarray, logprob: np.ndarray) -> None:
        """One level's features, [B, w, b]; `engine.calibration.draft_recorder` keeps them."""

    def concluded(self, tree: DraftTree, verdict: Verdict, requests: Sequence[SampleRequest]) -> None:
        """What became of the draft of these samples."""

    def _coefficients_of(self, levels: tuple[int, ...], count: int) -> Coefficients:
        """By level and rank, float32 [levels, b] each; kept."""
        if (levels, count) not in self._coefficients:
            found = self.model.coefficients(np.array(levels)[:, None], np.arange(1, count + 1))
            by = Coefficients(
                *(np.broadcast_to(each, (len(levels), count)).astype(np.float32) for each in found)
            )
            self._coefficients[levels, count] = by
        return self._coefficients[levels, count]
