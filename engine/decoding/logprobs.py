"""The one log-probability function of rollouts and training: equal logits give equal log-probabilities.

The logits are not equal to the bit: the learner runs the Hugging Face module, an engine its own forward or its own
products. The difference is rounding, and measured in every update (figure `learner/ratio_at_first_minibatch`); with
`trainer.scoring` engine the learner takes the engine's values (`learning.trainer.engine_scoring`) and there is none.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def scaled_logits(logits: Float[Tensor, "... V"], temperature: float) -> Float[Tensor, "... V"]:
    """Return `logits / T` in float32, of float64 in that; greedy decoding (T = 0) reports at T = 1."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def token_logprobs(
    logits: Float[Tensor, "M V"], token_ids: Int[Tensor, " M"], temperature: float
) -> Float[Tensor, " M"]:
    """Return log-softmax(logits / T) at `token_ids`: PPO's log-probability, unfiltered.

    Source: design 3.1, `policy_logprob`. Differentiable.
    """
    # one pass over a row, where logsumexp is four
    logprobs = torch.log_softmax(scaled_logits(logits, temperature), dim=-1)
    return logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
