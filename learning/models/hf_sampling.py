"""Plain batched sampling with Hugging Face `generate`, used while a pair is being made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel


@torch.inference_mode()
def sample_responses(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    eos_token_id: int,
    pad_token_id: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 128,
) -> list[np.ndarray]:
    """Sample one response a prompt; int64 tokens, the end token included, padding cut off.

    The model's training mode and the global random state come back as they were.
    """
    was_training = model.training
    model.eval()
    responses: list[np.ndarray] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            longest = max(len(prompt) for prompt in batch)
            ids = torch.full((len(batch), longest), pad_token_id, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(batch):
                ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
                mask[row, longest - len(prompt) :] = 1
            output = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new_tokens,
                pad_token_id=pad_token_id,
                eos_token_id=eos_token_id,
            )
            responses += [_cut(row[longest:].numpy(), eos_token_id) for row in output]
    model.train(was_training)
    return responses


def _cut(tokens: np.ndarray, eos_token_id: int) -> np.ndarray:
    ends = np.flatnonzero(tokens == eos_token_id)
    return tokens[: ends[0] + 1] if len(ends) else tokens
