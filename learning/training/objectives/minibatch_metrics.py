"""What an update reports of its loss: weighted sums within a minibatch, means over minibatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ....core.errors import NumericsError
from ..batching import PackedSequences
from .losses import PolicyLoss

FIRST_LOG_RATIO = "log_ratio_to_sampler"
_OF_SEEN = (
    "entropy",
    "approx_kl",
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    FIRST_LOG_RATIO,
)
"Means over the tokens whose logits were computed; of the others they are not known."


LOG_RATIO_BINS, LOG_RATIO_WIDTH = 32, 2.0**-6
"Of the histogram of token log-ratios, new over old: from -0.25 to 0.25, what is beyond in the outermost."


class OpenPart(NamedTuple):
    """What one trainer adds to a minibatch: weighted sums by name, their weight, the smallest and largest ratio."""

    sums: dict[str, float]
    weight: float
    ratios: tuple[float, float] | None


NOTHING = OpenPart({}, 0.0, None)


class MinibatchMetrics:
    """Weighted sums within a minibatch, plain means over minibatches; read from a device once a minibatch.

    `ratio_min` and `ratio_max` are over all of them. `ratio_at_first_minibatch` is the policy ratio furthest from 1
    before any step was taken: it says how well engine and learner agree on log-probabilities. It is left out where no
    sample of that minibatch had a gradient: no ratio was computed. `first_log_ratio` is the mean distance of the
    learner's own log-probabilities from the sampler's there, whatever forward or correction ratios are taken by.
    """

    def __init__(self) -> None:
        self._open: dict[str, Tensor] = {}
        self._open_weight: Tensor | None = None
        self._extremes: Tensor | None = None
        self._closed: list[dict[str, float]] = []
        self._ratios: list[tuple[float, float] | None] = []
        self._log_ratio_counts: Tensor | None = None
        self.work = (0, 0, 0)
        "this trainer's packs with a gradient, their tokens, and those of the rows that they stand for"

    def count(self, packed: PackedSequences) -> None:
        """Add a pack."""
        packs, tokens, of_rows = self.work
        self.work = packs + 1, tokens + len(packed.ids), of_rows + sum(len(one) for one in packed.places)

    def add(self, name: str, per_token: Float[Tensor, " M"], weight: Float[Tensor, " M"]) -> None:
        """Add a part of the current minibatch; weights of the whole minibatch sum to 1.

        Tokens that are left out count as 0 here, as they do in the loss.
        """
        part = (per_token.detach().float() * weight).sum().double()
        before = self._open.get(name)
        self._open[name] = part if before is None else before + part

    def add_ratio(
        self, policy: PolicyLoss, differences: Float[Tensor, " M"], weight: Float[Tensor, " M"]
    ) -> None:
        """Add what depends on the ratio: approx_kl (k3, Schulman 2020, of `differences` new less old), clip fractions.

        The ratios themselves are those of single tokens, whatever level the loss takes them at.
        """
        difference = differences.detach()
        total = weight.sum().double()
        self._open_weight = total if self._open_weight is None else self._open_weight + total
        self.add("approx_kl", torch.expm1(difference) - difference, weight)
        self.add("clip_fraction", (policy.clipped_low | policy.clipped_high).float(), weight)
        self.add("clip_fraction_low", policy.clipped_low.float(), weight)
        self.add("clip_fraction_high", policy.clipped_high.float(), weight)
        bins = (difference / LOG_RATIO_WIDTH).floor().long() + LOG_RATIO_BINS // 2
        before = self._log_ratio_counts
        if before is None:
            before = torch.zeros(LOG_RATIO_BINS, device=difference.device)
        counted = (weight > 0.0).float()
        self._log_ratio_counts = before.index_add(0, bins.clamp(0, LOG_RATIO_BINS - 1), counted)
        ratio = difference.exp()
        seen = ratio if self._extremes is None else torch.cat([self._extremes, ratio])
        self._extremes = torch.stack([seen.min(), seen.max()])

    def open_part(self) -> OpenPart:
        """This trainer's part of the minibatch that is under way; read from the device."""
        if self._open_weight is None or self._extremes is None:
            return NOTHING
        values = (
            torch.stack([*self._open.values(), self._open_weight, *self._extremes.double()]).cpu().tolist()
        )
        sums = dict(zip(self._open, values, strict=False))
        return OpenPart(sums, values[len(sums)], (values[-2], values[-1]))

    def close_minibatch(
        self, parts: Sequence[OpenPart], *, grad_norm: float, max_grad_norm: float = math.inf
    ) -> dict[str, float]:
        """End a minibatch after its optimizer step; its figures. `parts` are those of all trainers, by rank."""
        sums = dict(parts[0].sums)
        for part in parts[1:]:
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        ratios = [part.ratios for part in parts if part.ratios is not None]
        self._ratios.append((min(r[0] for r in ratios), max(r[1] for r in ratios)) if ratios else None)
        weight = sum(part.weight for part in parts)
        seen = {name: value / weight for name, value in sums.items() if name in _OF_SEEN}
        own = {"grad_norm": grad_norm, "grad_clipped_share": float(grad_norm > max_grad_norm)}
        self._closed.append({"policy_loss": 0.0, **sums, **seen, **own})
        self._open, self._open_weight, self._extremes = {}, None, None
        return self._closed[-1]

    def log_ratio_counts(self) -> tuple[int, ...]:
        """Tokens of this trainer in each bin of the histogram, over all minibatches; read from the device."""
        counts = self._log_ratio_counts
        return (
            (0,) * LOG_RATIO_BINS if counts is None else tuple(int(count) for count in counts.cpu().tolist())
        )

    def means(self) -> dict[str, float]:
        """Mean of every figure. Raises NumericsError naming one that is not finite."""
        out = {}
        for name in dict.fromkeys(name for one in self._closed for name in one):
            values = [one[name] for one in self._closed if name in one]
            out[name] = sum(values) / len(values)
        if out.pop(FIRST_LOG_RATIO, None) is not None and FIRST_LOG_RATIO in self._closed[0]:
            out["first_log_ratio"] = self._closed[0][FIRST_LOG_RATIO]
        out["num_skipped_minibatches"] = float(sum(one["grad_norm"] == 0.0 for one in self._closed))
        if self._ratios and self._ratios[0] is not None:
            out["ratio_at_first_minibatch"] = max(self._ratios[0], key=lambda ratio: abs(ratio - 1.0))
        if known := [ratios for ratios in self._ratios if ratios is not None]:
            out["ratio_min"], out["ratio_max"] = min(r[0] for r in known), max(r[1] for r in known)
        for name, value in out.items():
            if not math.isfinite(value):
                raise NumericsError(f"learner figure {name} is {value}; expected a finite number")
        return out


def added_up(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Counts of all trainers, one by one."""
    return tuple(sum(of_one) for of_one in zip(*counts, strict=True))
