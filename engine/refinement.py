"""A draft refined while it grows (design 3.2): scores from the acceptance model, decisions from the policy.

    level by level:  children and their estimated path acceptance -> another level?
    at the end:      which of all candidates are verified

The drafter calls it; the policy sees numpy arrays on the host. What was shown and decided is kept for the
step's record, so that a log replays. On a device that must not wait for the host, budgets are not refined.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from core.records import DraftLog
from policies.base import RefiningPolicy
from profiles.acceptance import MARGIN_FLOOR, AcceptanceModel


class Refinement:
    """One decode step's conversation between drafter and policy."""

    def __init__(
        self, policy: RefiningPolicy, scorer: Scorer, remaining: np.ndarray, clock: Callable[[], float]
    ) -> None:
        """Start a step.

        Args:
            policy: decides.
            scorer: estimates.
            remaining: tokens each sample may still get, [B]; deeper nodes cannot count.
            clock: seconds.
        """
        self.seconds = 0.0
        self.level_sizes: list[int] = []
        self.num_nodes: np.ndarray | None = None
        self._policy = policy
        self._scorer = scorer
        self._remaining = remaining
        self._shortest = int(remaining.min())
        self._clock = clock
        self._levels: list[np.ndarray] = []

    def children(
        self,
        scaled: Float[Tensor, "B w V"],
        perturbed: Float[Tensor, "B w V"],
        branching: int,
        parents: Float[Tensor, "B w"] | None,
    ) -> tuple[Int[Tensor, "B w b"], Float[Tensor, "B w b"]]:
        """Return the best children of every frontier node and their path scores; `parents` None means the root."""
        started = self._clock()
        level = len(self._levels) + 1
        ids, share = self._scorer.children(scaled, perturbed, branching, level)
        scores = share if parents is None else share * parents[..., None]
        if level >= self._shortest:
            late = torch.from_numpy(self._remaining <= level).to(scores.device)
            scores = scores.masked_fill(late[:, None, None], 0.0)
        self._levels.append(scores.flatten(1).cpu().numpy())
        self.level_sizes.append(self._levels[-1].shape[1])
        self.seconds += self._clock() - started
        return ids, scores

    def deepen(self) -> bool:
        """Ask the policy whether another level is worth its time."""
        started = self._clock()
        answer = self._policy.deepen(len(self._levels), self._levels[-1])
        self.seconds += self._clock() - started
        return answer

    def select(self) -> np.ndarray:
        """Ask the policy how many nodes of each sample to verify, [B]."""
        started = self._clock()
        self.num_nodes = self._policy.select(self.scores, tuple(self.level_sizes))
        self.seconds += self._clock() - started
        return self.num_nodes

    def log(self, num_accepted: np.ndarray) -> DraftLog | None:
        """Return what happened, None when nothing was selected."""
        if self.num_nodes is None:
            return None
        scores = self.scores
        return DraftLog(
            scores=scores,
            level_sizes=tuple(self.level_sizes),
            num_nodes=self.num_nodes,
            num_accepted=num_accepted,
            expected_tokens=expected_tokens(scores, self.num_nodes),
        )

    @property
    def scores(self) -> np.ndarray:
        """All candidates' scores, [B, C], level by level."""
        return self._levels[0] if len(self._levels) == 1 else np.concatenate(self._levels, axis=1)


def expected_tokens(scores: np.ndarray, num_nodes: np.ndarray) -> float:
    """Sum of each sample's `num_nodes[b]` best scores."""
    best = -np.sort(-scores, axis=1)
    return float(best[np.arange(scores.shape[1]) < num_nodes[:, None]].sum())


class Scorer:
    """The acceptance model as tensor operations; keeps features when told to record."""

    def __init__(self, model: AcceptanceModel, *, record: bool = False) -> None:
        self.model = model
        self.recorded: list[tuple[np.ndarray, np.ndarray]] | None = [] if record else None
        "margin and log-probability of every level's children since the list was last cleared, [B, w, b]"
        self._weights: dict[tuple[int, int, torch.device], Tensor] = {}

    def children(
        self, scaled: Tensor, perturbed: Tensor, branching: int, level: int
    ) -> tuple[Int[Tensor, "B w b"], Float[Tensor, "B w b"]]:
        """Return the `branching` best children by perturbed score, and their conditional acceptance."""
        count = min(branching, scaled.shape[-1] - 1)
        values, ids = perturbed.topk(count + 1, dim=-1)
        # rank 1 leads the second, the others trail the first
        margin = values[..., :1] - values[..., 1:]
        if count > 1:
            margin = torch.cat([margin[..., :1], margin[..., : count - 1]], dim=-1)
        ids = ids[..., :count]
        logprob = scaled.gather(-1, ids) - torch.logsumexp(scaled, dim=-1, keepdim=True)
        if self.recorded is not None:
            self.recorded.append((margin.cpu().numpy(), logprob.cpu().numpy()))
        weight = self._weight(level, count, scaled.device)
        logit = (margin + MARGIN_FLOOR).log_().mul_(weight[1]).add_(weight[0])
        logit.addcmul_(margin, weight[2]).addcmul_(logprob, weight[3])
        return ids, logit.sigmoid_()

    def _weight(self, level: int, count: int, device: torch.device) -> Float[Tensor, "4 b"]:
        """Coefficients by rank for one level: intercept, log margin, margin, log-probability."""
        key = (level, count, device)
        if key not in self._weights:
            first, other = self.model.first, self.model.other
            columns = [[first[0] + first[4] * np.log(level), *first[1:4]]]
            for rank in range(2, count + 1):
                intercept = other[0] + other[3] * np.log(level) + other[4] * np.log(rank)
                columns.append([intercept, 0.0, other[1], other[2]])
            self._weights[key] = torch.tensor(columns, dtype=torch.float32, device=device).T.contiguous()
        return self._weights[key]
