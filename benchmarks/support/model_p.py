"""Model P: the random Llama on which engines are compared, and its prompts.

8 layers, hidden 512, 8 heads over 4 KV heads, inner size 1536, vocabulary 4096: 29.4M parameters. Random weights
decode at the speed of trained ones; every engine decodes the same number of tokens, greedily.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream

VOCAB_SIZE = 4096
PROMPT_TOKENS = 64
"All prompts are equally long: some peers feed longer ones token by token."
NEW_TOKENS = 128
_SEED = 20260


def model_p_folder(cache_dir: Path) -> Path:
    """Make the checkpoint once; returns its folder."""
    folder = cache_dir / "model-p"
    if not (folder / "config.json").is_file():
        torch.manual_seed(_SEED)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            eos_token_id=None,
            bos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def model_p_requests(
    count: int, *, prompt_tokens: int = PROMPT_TOKENS, new_tokens: int = NEW_TOKENS
) -> list[SampleRequest]:
    """Random prompts of one length, greedy, no stop token."""
    random = np.random.default_rng(_SEED)
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)
    return [
        SampleRequest(
            key=SampleKey(run_seed=_SEED, stream=Stream.BENCH, sample_index=index),
            prompt=Prompt(prompt_id=index, token_ids=random.integers(1, VOCAB_SIZE, prompt_tokens)),
            sampling=sampling,
        )
        for index in range(count)
    ]
