"""What TRL documents of its trainer to a `rollout_func`, without TRL: weights, arguments, step, rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

ARGUMENTS = {
    "seed": 7,
    "temperature": 0.8,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "use_vllm": False,
    "max_completion_length": 12,
    "bf16": False,
    "fp16": False,
}


def trl_like(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rank: int = 0,
    ranks: int = 1,
    **changes: Any,
) -> Any:
    """A trainer at step 0; `changes` are of its arguments."""
    return SimpleNamespace(
        model=model.train(),
        processing_class=tokenizer,
        args=SimpleNamespace(**ARGUMENTS | changes),
        state=SimpleNamespace(global_step=0),
        is_in_train=True,
        accelerator=SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=ranks,
            process_index=rank,
            unwrap_model=lambda one: one,
            gather=lambda one: one,
        ),
    )
