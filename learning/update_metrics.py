"""Collects an update's figures, minibatch by minibatch, and averages them at the end."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from core.errors import NumericsError

_OF_SEEN = ("entropy", "approx_kl", "clip_fraction")
"Means over the tokens whose logits were computed; of the others they are not known."


class MinibatchFigures:
    """Weighted sums within a minibatch, plain means over minibatches.

    `ratio_at_first_minibatch` is the policy ratio furthest from 1 before any step was taken: it says
    how well engine and learner agree on log-probabilities. It is left out where no sample of that minibatch had a
    gradient: no ratio was computed.
    """

    def __init__(self) -> None:
        self._open: dict[str, float] = {}
        self._open_weight = 0.0
        self._closed: list[dict[str, float]] = []
        self._first_ratio: float | None = None

    def add(self, name: str, per_token: Float[Tensor, " M"], weight: Float[Tensor, " M"]) -> None:
        """Add a part of the current minibatch; weights of the whole minibatch sum to 1.

        Tokens that are left out count as 0 here, as they do in the loss.
        """
        part = float((per_token.detach().float() * weight).sum())
        self._open[name] = self._open.get(name, 0.0) + part

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
        self._open_weight += float(weight.sum())
        self.add("approx_kl", torch.expm1(difference) - difference, weight)
        self.add("clip_fraction", ((ratio - 1.0).abs() > clip_ratio).float(), weight)
        if not self._closed:
            furthest = float(ratio[(ratio - 1.0).abs().argmax()])
            if self._first_ratio is None or abs(furthest - 1.0) > abs(self._first_ratio - 1.0):
                self._first_ratio = furthest

    def close_minibatch(self, *, grad_norm: float) -> None:
        """End a minibatch after its optimizer step."""
        seen = {name: value / self._open_weight for name, value in self._open.items() if name in _OF_SEEN}
        self._closed.append({"policy_loss": 0.0, **self._open, **seen, "grad_norm": grad_norm})
        self._open, self._open_weight = {}, 0.0

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
