"""A tiny target and draft that read any text by its bytes, with a chat template."""

from __future__ import annotations

from pathlib import Path

from random_pair import save_random_pair
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
    save_random_pair(folder, fast, positions=512, target_layers=3)
