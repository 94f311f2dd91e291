"""A reward model of a few thousand random parameters, with or without a chat template."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlhfspec.learning.models.tokenization import character_tokenizer
from rlhfspec.learning.tasks.chain_task import ALPHABET

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""One letter for the role, then the text; the alphabet of the chain task has u and a only as far as it goes."""


def save_reward_model(
    folder: Path, *, num_labels: int = 1, chat: bool = False, max_positions: int = 128, pad: bool = True
) -> str:
    """Write model and tokenizer into `folder` and return it."""
    tokenizer = character_tokenizer(ALPHABET + "us")
    if chat:
        tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id if pad else None,
        max_position_embeddings=max_positions,
        initializer_range=0.5,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
