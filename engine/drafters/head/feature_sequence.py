"""What one sequence gives a draft head to learn from: its tokens and the target's hidden states at them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSequence:
    """Prompt and response of T tokens, at least two; H is the target's hidden size.

    The target's distribution at position j (of token j + 1) is `softmax(lm_head(norm(last[j - first])) / T)`.
    """

    token_ids: np.ndarray
    "int64 [T]"
    prompt_length: int
    taps: Tensor
    "[T - 1, 3 H], bfloat16 or float32: inputs of the tapped layers, side by side, at positions 0 to T - 2"
    last: Tensor
    "[T - 1 - first, H]: output of the target's last layer before its final norm, at positions first to T - 2"

    def __post_init__(self) -> None:
        total, hidden = len(self.token_ids), self.last.shape[-1]
        if not 1 <= self.prompt_length < total:
            raise ValueError(
                f"a prompt of {self.prompt_length} tokens was expected to leave a response in {total} tokens"
            )
        if tuple(self.taps.shape) != (total - 1, 3 * hidden):
            raise ValueError(f"taps expected to be [{total - 1}, {3 * hidden}], got {list(self.taps.shape)}")
        if len(self.last) != total - 1 - self.first:
            raise ValueError(f"last expected to have {total - 1 - self.first} rows, got {len(self.last)}")

    @property
    def first(self) -> int:
        """Position of the first row of `last`: it predicts the response's first token. Prompts need none."""
        return self.prompt_length - 1

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the target sampled."""
        return len(self.token_ids) - self.prompt_length

    @property
    def num_bytes(self) -> int:
        """Memory that tokens and hidden states take."""
        return self.token_ids.nbytes + self.taps.nbytes + self.last.nbytes
