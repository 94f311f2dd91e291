"""What completions are compared with: another way to decode them, bit by bit, and the teacher-forced reference.

The reference is one plain Hugging Face forward over prompt and response.

At each position the rule (design 3.1) applied to the forward's logits must give the emitted token, and the
log-probabilities must agree. Positions where rounding can decide are counted as near ties, with their evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from ...core.records import Completion, SampleKey, SampleRequest
from ...engine.decoding.noise import gumbel_noise, key_words
from ...engine.decoding.sampling_rule import RowSampling, emitted_logprobs, perturb, scale

BITS = ("token_ids", "policy_logprobs", "sampling_logprobs", "is_sampled")


def same_bits(a: Completion, b: Completion) -> bool:
    """Whether two completions say the same, bit for bit."""
    same = all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in BITS)
    return same and a.finish_reason == b.finish_reason


def count_mismatches(found: Mapping[SampleKey, Completion], expected: Mapping[SampleKey, Completion]) -> int:
    """Samples found that are not the expected ones, bit for bit; the expected may be more."""
    return sum(not same_bits(completion, expected[key]) for key, completion in found.items())


TIE_GAP = 1e-4
"A perturbed gap below this, divided by T, may fall either way in float32."
NUCLEUS_MARGIN = 1e-5
"A token whose cumulative mass lies this close to top_p may be kept or dropped."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """What the comparison of one response found."""

    num_mismatches: int
    num_near_ties: int
    logprob_max_abs_error: float
    evidence: tuple[str, ...]
    "one line for each position that differs, near tie or not"


@torch.inference_mode()
def compare_with_reference(
    model: PreTrainedModel, request: SampleRequest, completion: Completion, vocab_size: int
) -> ReferenceResult:
    """Replay the rule over a plain forward of `model`, which must not be an engine's."""
    prompt = torch.from_numpy(request.prompt.token_ids)
    response = torch.from_numpy(completion.token_ids)
    full = model(torch.cat([prompt, response])[None], use_cache=False).logits
    logits = full[:, len(prompt) - 1 : -1, :vocab_size]
    rows = RowSampling.of([request.sampling], logits.device)
    positions = np.arange(len(prompt), len(prompt) + len(response))[None]
    noise = gumbel_noise(key_words(request.key, request.prompt.token_ids)[None], positions, vocab_size)
    scaled = scale(logits, rows)
    perturbed = perturb(scaled, noise, rows)
    differs = perturbed.argmax(-1)[0] != response
    unsure = _near_tie(perturbed[0], request) | _near_nucleus(scaled, request)
    policy, sampling = emitted_logprobs(scaled, response[None], rows)
    error = (policy[0] - torch.from_numpy(completion.policy_logprobs)).abs()
    filtered = (sampling[0] - torch.from_numpy(completion.sampling_logprobs)).abs()
    errors = torch.cat([error, filtered[~unsure]])
    gap = _perturbed_gap(perturbed[0])
    return ReferenceResult(
        num_mismatches=int((differs & ~unsure).sum()),
        num_near_ties=int((differs & unsure).sum()),
        logprob_max_abs_error=float(errors.max()),
        evidence=tuple(
            f"sample {request.key.sample_index} position {t}: emitted {int(response[t])}, reference "
            f"{int(perturbed[0, t].argmax())}, perturbed gap {float(gap[t]):.1e}, near tie: {bool(unsure[t])}"
            for t in differs.nonzero().flatten().tolist()
        ),
    )


def _perturbed_gap(perturbed: Tensor) -> Tensor:
    best = perturbed.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def _near_tie(perturbed: Tensor, request: SampleRequest) -> Tensor:
    return _perturbed_gap(perturbed) < TIE_GAP / (request.sampling.temperature or 1.0)


def _near_nucleus(scaled: Tensor, request: SampleRequest) -> Tensor:
    sampling = request.sampling
    if sampling.top_p >= 1.0 or sampling.temperature == 0.0:
        return torch.zeros(scaled.shape[1], dtype=torch.bool)
    mass = torch.softmax(scaled[0].sort(dim=-1, descending=True).values, dim=-1).cumsum(-1)
    return ((mass - sampling.top_p).abs() < NUCLEUS_MARGIN).any(-1)
