"""A tiny target and draft that read any text by its bytes, with a chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAMES = ("<pad>", "<end>", "<system>", "<user>", "<assistant>")


def save_byte_pair(folder: Path) -> None:
    """Write `folder/target` and `folder/draft`: random weights, 512 positions."""
    words = {name: i for i, name in enumerate([*NAMES, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=list(NAMES[2:]),
    )
    fast.chat_template = TEMPLATE
    for seed, (name, num_layers) in enumerate((("target", 3), ("draft", 1))):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
