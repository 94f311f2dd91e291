"""A tiny target and draft with random weights, which are the same in every session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase


def save_random_pair(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positions: int,
    target_layers: int = 2,
    tied: bool = False,
) -> None:
    """Write `folder/target` and `folder/draft`, of one layer, for a tokenizer, which is written beside both.

    `tied`: their head has the weights of their embeddings.
    """
    end: Any = tokenizer.eos_token_id
    pad: Any = tokenizer.pad_token_id
    for seed, (name, num_layers) in enumerate((("target", target_layers), ("draft", 1))):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=positions,
            tie_word_embeddings=tied,
            eos_token_id=end,
            pad_token_id=pad,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
