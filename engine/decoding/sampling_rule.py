"""The sampling rule: what the target's token at a position *is* (design 3.1).

    token(t) = argmax over the tokens kept by top-k and min-p, then top-p, of  logits / T + g[t]

With Gumbel noise `g` the argmax is an exact sample of softmax(logits / T) restricted to the kept tokens
(Gumbel-max identity). At T = 0 the noise is zero. Plain decoding emits this token; verification accepts a
draft child iff it equals this token. Nothing else in the engine decides tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.records import SamplingParams
from ..upload import upload
from .logprobs import token_logprobs
from .noise import Noise

_RATES = ("temperature", "divisor", "noise_factor", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of each sample of the batch, with what is the same for all known on the host."""

    temperature: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    min_p: Float[Tensor, " B"]
    divisor: Float[Tensor, " B"]
    "of the logits: T, 1 where T = 0"
    noise_factor: Float[Tensor, " B"]
    "1; 0 where T = 0"
    unit_temperature: bool
    "every T is 0 or 1: dividing changes nothing"
    any_greedy: bool
    any_filter: bool

    @staticmethod
    def of(params: list[SamplingParams], device: torch.device) -> RowSampling:
        """Collect the parameters of the running samples, in slot order."""
        return RowSampling.of_rates(
            upload(RowSampling.host_rates(params), device),
            unit_temperature=all(p.temperature in (0.0, 1.0) for p in params),
            any_greedy=any(p.temperature == 0.0 for p in params),
            any_filter=any(p.filters for p in params),
        )

    @staticmethod
    def of_rates(rates: Sequence[Tensor], **of_all: bool) -> RowSampling:
        """Take over what `host_rates` returns, on the device, and what is the same for all."""
        given: dict[str, Any] = dict(zip(_RATES, rates, strict=True)) | of_all
        return RowSampling(**given)

    @staticmethod
    def host_rates(params: list[SamplingParams]) -> list[np.ndarray]:
        """Return temperature, divisor, noise factor, top-k, top-p and min-p of each sample as arrays [B]."""
        temperature = np.array([p.temperature for p in params])
        divisor = np.where(temperature == 0.0, 1.0, temperature)
        rates = [each.astype(np.float32) for each in (temperature, divisor, temperature > 0.0)]
        shares = [np.array([getattr(p, one) for p in params], dtype=np.float32) for one in ("top_p", "min_p")]
        return [*rates, np.array([p.top_k for p in params], dtype=np.int64), *shares]


def scale(logits: Float[Tensor, "B R V"], rows: RowSampling) -> Float[Tensor, "B R V"]:
    """Return float32 `logits / T`, T = 0 read as 1."""
    logits = logits.float()
    if rows.unit_temperature:
        return logits
    return logits / rows.divisor[:, None, None]


def perturb(
    scaled: Float[Tensor, "B R V"],
    noise: Float[Tensor, "B R V"],
    rows: RowSampling,
    kept: Bool[Tensor, "B R V"] | None = None,
) -> Float[Tensor, "B R V"]:
    """Add the noise, drop what the filters drop (to -inf). The rule is the argmax of this. `kept`: see `choose`."""
    if rows.any_greedy:
        noise = noise * rows.noise_factor[:, None, None]
    perturbed = scaled + noise
    if rows.any_filter:
        kept = kept_tokens(scaled, rows) if kept is None else kept
        perturbed = perturbed.masked_fill(~kept, float("-inf"))
    return perturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The best tokens of each row by perturbed score, best first."""

    token_ids: Int[Tensor, "B R k"]
    scores: np.ndarray
    "perturbed, float32 [B, R, k] on the host: small arrays, which numpy handles at least cost"
    logprobs: np.ndarray
    "of the tokens, unfiltered; float32 [B, R, k]"


def choose(
    logits: Float[Tensor, "B R V"],
    noise: Noise,
    levels: Int[Tensor, "B R"],
    rows: RowSampling,
    kept: Bool[Tensor, "B R V"] | None = None,
) -> Int[Tensor, "B R"]:
    """Return the rule's token of every row, whose noise is that of its level. Ties go to the smaller token id.

    `kept`: what the filters keep (`kept_tokens`), where that is known; needed only where any sample filters.
    """
    if not rows.any_filter:
        chosen = noise.choose(logits, levels, rows.divisor, rows.noise_factor)
        if chosen is not None:
            return chosen
    return perturb(scale(logits, rows), noise.of_levels(levels), rows, kept).argmax(-1)


def leaders(
    logits: Float[Tensor, "B R V"],
    noise: Noise,
    levels: Int[Tensor, "B R"],
    rows: RowSampling,
    count: int,
) -> TopK:
    """Return the `count` best tokens of every row: more than one, at most V.

    Their log-probabilities are under softmax(logits / T).
    """
    found = _leaders_in_one_pass(logits, noise, levels, rows, count, share=0.0)
    if found is not None:
        ids, scores, logprobs = found
        return TopK(token_ids=ids, scores=scores, logprobs=logprobs)
    scaled = scale(logits, rows)
    best, ids = perturb(scaled, noise.of_levels(levels), rows).topk(count, dim=-1)
    logprobs = torch.log_softmax(scaled, -1).gather(-1, ids)
    return TopK(token_ids=ids, scores=best.cpu().numpy(), logprobs=logprobs.cpu().numpy())


def leader_shares(
    logits: Float[Tensor, "B R V"],
    noise: Noise,
    levels: Int[Tensor, "B R"],
    rows: RowSampling,
    count: int,
) -> tuple[Int[Tensor, "B R k"], Float[Tensor, "B R k"]]:
    """Return the `count` best tokens of every row and their shares of the softmax of the perturbed scores.

    Both stay on the device: a draft that no policy looks at grows without the host.
    """
    found = _leaders_in_one_pass(logits, noise, levels, rows, count, share=1.0)
    if found is not None:
        return found[0], torch.from_numpy(np.exp(found[2]))
    everything = perturb(scale(logits, rows), noise.of_levels(levels), rows)
    best, ids = everything.topk(count, dim=-1)
    return ids, (best - everything.logsumexp(-1, keepdim=True)).exp()


def _leaders_in_one_pass(
    logits: Tensor, noise: Noise, levels: Tensor, rows: RowSampling, count: int, *, share: float
) -> tuple[Tensor, np.ndarray, np.ndarray] | None:
    """`Noise.leaders`, which knows no filters; None: look at all values."""
    if rows.any_filter:
        return None
    return noise.leaders(logits, levels, rows.divisor, rows.noise_factor, count=count, share=share)


def kept_tokens(scaled: Float[Tensor, "B R V"], rows: RowSampling) -> Bool[Tensor, "B R V"]:
    """Mark the tokens that top-k and min-p, then top-p, keep. Ties go to the smaller token id.

    min-p drops those less likely than min_p times the best (Nguyen et al. 2024, equation 2; as in vLLM before top-p).
    top-p keeps the smallest set, by falling probability among what these keep, whose mass reaches top_p.
    """
    vocab_size = scaled.shape[-1]
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    limit = torch.where(rows.top_k > 0, rows.top_k, vocab_size)[:, None, None]
    in_first = torch.arange(vocab_size, device=scaled.device) < limit
    in_first = in_first & ((ordered - ordered[..., :1]).exp() >= rows.min_p[:, None, None])
    probs = torch.softmax(ordered.masked_fill(~in_first, float("-inf")), dim=-1)
    mass_before = probs.cumsum(-1) - probs
    top_p = rows.top_p[:, None, None]
    kept = in_first & ((mass_before < top_p) | (top_p >= 1.0))
    # a top_p that rounds to 0 still keeps the best
    kept[..., :1].fill_(True)
    kept |= (rows.temperature == 0.0)[:, None, None]
    return torch.zeros_like(kept).scatter_(-1, ids, kept)


def emitted_logprobs(
    scaled: Float[Tensor, "B R V"],
    token_ids: Int[Tensor, "B R"],
    rows: RowSampling,
    kept: Bool[Tensor, "B R V"] | None = None,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Return policy_logprob (unfiltered) and sampling_logprob (after the filters; 0 when greedy).

    `kept`: see `choose`.
    """
    flat = scaled.reshape(-1, scaled.shape[-1])
    policy = token_logprobs(flat, token_ids.reshape(-1), 1.0).view(token_ids.shape)
    sampling = policy
    if rows.any_filter:
        kept = kept_tokens(scaled, rows) if kept is None else kept
        flat = scaled.masked_fill(~kept, float("-inf")).reshape(-1, scaled.shape[-1])
        sampling = token_logprobs(flat, token_ids.reshape(-1), 1.0).view(token_ids.shape)
    if rows.any_greedy:
        sampling = sampling * rows.noise_factor[:, None]
    return policy, sampling
