"""How often a target is expected to say each token, by its own distributions: few responses tell the rare ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rlhfspec.engine.drafters.head.feature_sequence import FeatureSequence
from rlhfspec.learning.drafts.operations import fastest_dtype

MAX_POSITIONS = 8192
ROWS = 256


@torch.no_grad()
def expected_counts(
    sequences: Sequence[FeatureSequence],
    *,
    output_weight: Float[Tensor, "V H"],
    final_norm_gain: Float[Tensor, " H"],
    final_norm_eps: float,
    temperature: float,
    max_positions: int = MAX_POSITIONS,
) -> Float[Tensor, " V"]:
    """Return the expected number of every token over response positions, at most `max_positions` evenly taken.

    Measured on SmolLM2-135M-Instruct at T = 1: of the tokens of unseen responses, a vocabulary of 8,192 by these
    counts over 4,600 positions has 95.5%, one by the tokens that 37,000 positions sampled 93.3%.
    """
    counts = torch.zeros(len(output_weight))
    total = sum(len(sequence.last) for sequence in sequences)
    if not total:
        return counts
    every = -(-total // max_positions)
    last = torch.cat([sequence.last for sequence in sequences])[::every]
    device = output_weight.device
    dtype = fastest_dtype() if device.type == "cpu" else torch.bfloat16
    weight, gain = output_weight.to(dtype), final_norm_gain.float()
    for rows in last.split(ROWS):
        states = F.rms_norm(rows.to(device).float(), gain.shape, gain, final_norm_eps)
        logits = (states.to(dtype) @ weight.t()).float() / (temperature or 1.0)
        counts += logits.softmax(-1).sum(0).cpu()
    return counts * every
