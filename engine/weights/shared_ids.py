"""The ids that only one of two tokenizers has, as decoding and learning leave them out.

A draft model's config names them (`foreign_token_ids`, as ranges; `engine.weights.draft_vocabulary`), so that they go
with its weights: to instances, trainers and checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

FOREIGN_KEY = "foreign_token_ids"
NEVER = -1e9
"A logit that nothing is chosen by; finite, so that 0 times it is 0."


def foreign_of(config: Any, num_ids: int) -> Int[Tensor, " F"] | None:
    """Return the ids below `num_ids` that a draft model of this config never drafts; None: it drafts them all."""
    ids = [number for number in listed(config) if number < num_ids]
    return torch.tensor(ids) if ids else None


def without(logits: Float[Tensor, "... V"], foreign: Int[Tensor, " F"] | None) -> Float[Tensor, "... V"]:
    """Return logits by which no foreign id is chosen; the very same where there are none."""
    return logits if foreign is None else logits.index_fill(-1, foreign.to(logits.device), NEVER)


def listed(config: Any) -> list[int]:
    """The ids that a config names."""
    return [number for begin, end in getattr(config, FOREIGN_KEY, None) or () for number in range(begin, end)]
