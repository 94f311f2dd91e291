"""A tiny target and draft that call the weather tool and answer what it says: each word follows from the last alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from hermes_chat import HERMES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROLES = ["<pad>", "<end>", "<unk>", "<user>", "<assistant>", "<tool>", "<answer>"]
CALL = ["<assistant>", "<tool_call>", '{"name":', '"weather",', '"arguments":', '{"city":', '"Oslo"}}']
ANSWER = ["<answer>", "It", "is", "warm", "<end>"]
CHAINS = ([*CALL, "</tool_call>", "<end>"], ANSWER)
ASKS = "{% if messages[-1].role == 'tool' %}<answer>{% else %}<assistant>{% endif %}"


def save_calling_pair(folder: Path) -> None:
    """Write `folder/target` and `folder/draft`, which are equal; greedily they say CHAINS."""
    words = [*ROLES, *CALL[1:], "</tool_call>", *ANSWER[1:-1]]
    ids = {word: one for one, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=ROLES[3:],
    )
    fast.chat_template = HERMES.replace("<end>", " <end>").replace("<assistant>{% endif", ASKS + "{% endif")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        # nothing is added to the embedding, which names the token
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(words), 32))
        model.lm_head.weight.zero_()
        for chain in CHAINS:
            for word, follows in pairwise(chain):
                model.lm_head.weight[ids[follows], ids[word]] = 4.0
    for name in ("target", "draft"):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
