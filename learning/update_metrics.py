"""Collects an update's figures, minibatch by minibatch, and averages them at the end.

Sums stay on the device while packs are computed and are read once a minibatch: each number read from a GPU is a wait
for everything that was ordered before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from core.errors import NumericsError

_OF_SEEN = ("entropy", "approx_kl", "clip_fraction")
"Means over the tokens whose logits were computed; of the others they are not known."


class OpenPart(NamedTuple):
    """What one trainer adds to a minibatch: weighted sums by name, their weight, the ratio furthest from 1."""

    sums: dict[str, float]
    weight: float
    furthest_ratio: float | None


class MinibatchFigures:
    """Weighted sums within a minibatch, plain means over minibatches.

    `ratio_at_first_minibatch` is the policy ratio furthest from 1 before any step was taken: it says
    how well engine and learner agree on log-probabilities. It is left out where no sample of that minibatch had a
    gradient: no ratio was computed.
    """

    def __init__(self) -> None:
        self._open: dict[str, Tensor] = {}
        self._open_weight: Tensor | None = None
        self._furthest: Tensor | None = None
        self._closed: list[dict[str, float]] = []
        self._first_ratio: float | None = None

    def add(self, name: str, per_token: Float[Tensor, " M"], weight: Float[Tensor, " M"]) -> None:
        """Add a part of the current minibatch; weights of the whole minibatch sum to 1.

        Tokens that are left out count as 0 here, as they do in the loss.
        """
        part = (per_token.detach().float() * weight).sum().double()
        before = self._open.get(name)
        self._open[name] = part if before is None else before + part

    def add_ratio(
        self,
        logprobs: Float[Tensor, " M"],
        old_logprobs: Float[Tensor, " M"],
        weight: Float[Tensor, " M"],
        *,
        clip_ratio: float,
    ) -> None:
        """Add what depends on the ratio: approx_kl (k3, Schulman 2020) and clip_fraction."""
        difference = logprobs.detach() - old_logprobs
        ratio = difference.exp()
        total = weight.sum().double()
        self._open_weight = total if self._open_weight is None else self._open_weight + total
        self.add("approx_kl", torch.expm1(difference) - difference, weight)
        self.add("clip_fraction", ((ratio - 1.0).abs() > clip_ratio).float(), weight)
        if not self._closed:
            seen = ratio if self._furthest is None else torch.cat([self._furthest, ratio])
            # not seen[place]: that would read the place
            self._furthest = seen.gather(0, (seen - 1.0).abs().argmax(dim=0, keepdim=True))

    def open_part(self) -> OpenPart:
        """This trainer's part of the minibatch that is under way; read from the device."""
        if self._open_weight is None:
            return OpenPart({}, 0.0, None)
        numbers = [*self._open.values(), self._open_weight]
        if self._furthest is not None:
            numbers.append(self._furthest[0].double())
        values = torch.stack(numbers).tolist()
        sums = dict(zip(self._open, values, strict=False))
        return OpenPart(sums, values[len(sums)], values[-1] if self._furthest is not None else None)

    def close_minibatch(self, parts: Sequence[OpenPart], *, grad_norm: float) -> None:
        """End a minibatch after its optimizer step; `parts` are those of all trainers, by rank."""
        sums = dict(parts[0].sums)
        for part in parts[1:]:
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        if not self._closed:
            ratios = [part.furthest_ratio for part in parts if part.furthest_ratio is not None]
            self._first_ratio = max(ratios, key=lambda ratio: abs(ratio - 1.0), default=None)
        weight = sum(part.weight for part in parts)
        seen = {name: value / weight for name, value in sums.items() if name in _OF_SEEN}
        self._closed.append({"policy_loss": 0.0, **sums, **seen, "grad_norm": grad_norm})
        self._open, self._open_weight, self._furthest = {}, None, None

    def means(self) -> dict[str, float]:
        """Mean of every figure. Raises NumericsError naming one that is not finite."""
        out = {}
        for name in dict.fromkeys(name for one in self._closed for name in one):
            values = [one[name] for one in self._closed if name in one]
            out[name] = sum(values) / len(values)
        if self._first_ratio is not None:
            out["ratio_at_first_minibatch"] = self._first_ratio
        for name, value in out.items():
            if not math.isfinite(value):
                raise NumericsError(f"learner figure {name} is {value}; expected a finite number")
        return out
