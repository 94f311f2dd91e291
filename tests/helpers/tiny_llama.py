"""A Llama of two layers, for the learner's tests."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "pad_token_id": 0,
}
"Of the config of a Llama, or of another family with its names."


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers, 4 heads over 2 KV heads, vocabulary 19; `changes` are of its config."""
    torch.manual_seed(seed)
    settings = SIZES | {"eos_token_id": 1, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**settings | changes))
