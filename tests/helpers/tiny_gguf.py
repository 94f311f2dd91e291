"""A GGUF file of a random two-layer Llama with a real BPE vocabulary, and a wheel that holds it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.learning.models.catalog import KnownModel

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = [
    "system user assistant\nYou are a helpful AI assistant named Tiny.",
    "In one short sentence: what is a lamp? It doesn't say 1984, 12 and 345; they'll see.",
    "A dog, a cat and a house. The house is red. The dogs run  and  run.",
]
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyGguf:
    """The file, and what it was made from."""

    file: Path
    model: LlamaForCausalLM
    "its matrices hold what the quantised blocks stand for"
    tokens: list[str]
    merges: list[str]


def write_tiny_gguf(
    file: Path,
    *,
    chat_template: str | None = TEMPLATE,
    split: str = "smollm",
    eos_id: int = 2,
    adds_bos: bool | None = False,
    tensors: tuple[str, ...] = (),
    without: str = "",
    metadata: Mapping[str, int] | None = None,
) -> TinyGguf:
    """Write the file as llama.cpp's converter would: rows of q and k reordered, matrices as Q4_1 blocks.

    `tensors` are written besides, the one called `without` is not; `metadata` are whole numbers.
    """
    tokens, merges = _vocabulary()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(file, "llama")
    _write_head(writer, config)
    _write_vocabulary(writer, tokens, merges, chat_template=chat_template, split=split, eos_id=eos_id)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    for name, parameter in model.named_parameters():
        if name != without:
            _write_tensor(writer, name, parameter, config)
    for name in tensors:
        writer.add_tensor(name, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyGguf(file=file, model=model, tokens=tokens, merges=merges)


def write_wheel(
    folder: Path, gguf_file: Path, *, name: str = "tiny-model", version: str = "1.0"
) -> KnownModel:
    """Put the file into a wheel in `folder`; return the model that it is known as."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, f"{module}/tiny.Q4_1.gguf")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return KnownModel(
        name="tiny",
        licence="Apache-2.0",
        hub=None,
        package=name,
        version=version,
        sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
    )


def _vocabulary() -> tuple[list[str], list[str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    ids = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(ids, key=lambda token: ids[token]), [" ".join(pair) for pair in merges]


def _write_head(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)


def _write_vocabulary(
    writer: gguf.GGUFWriter,
    tokens: list[str],
    merges: list[str],
    *,
    chat_template: str | None,
    split: str,
    eos_id: int,
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos_id)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, parameter: torch.nn.Parameter, config: LlamaConfig
) -> None:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    values = parameter.detach().numpy()
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    count = next((number for part, number in heads.items() if part in name), None)
    stored = values if count is None else _interleaved(values, count)
    kind = gguf.GGMLQuantizationType.Q8_0 if name.startswith("token") else gguf.GGMLQuantizationType.Q4_1
    blocks = quantize(np.ascontiguousarray(stored), kind)
    writer.add_tensor(name, blocks, raw_dtype=kind)
    unpacked = dequantize(blocks, kind)
    back = unpacked if count is None else _deinterleaved(unpacked, count)
    parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(back)))


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Order of rows in llama.cpp: the two halves that rotate together lie side by side."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _deinterleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
