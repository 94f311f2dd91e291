"""llama.cpp as a peer: its server with a slot a sample, on the CPU, asked over loopback.

In float32 weights, arithmetic and KV cache are float32: its flash attention rounds keys and values to float16, so it
is off. With bfloat16 weights it and the float16 cache are as they come; no prompt is kept for another sample. The
checkpoint, a Llama's in float32, is written as GGUF once. No tokenizer is needed: token ids go in and come out, and no
token ends a text. With a draft model it speculates by chains of DRAFT_TOKENS.
Checked in float32 on a random 2-layer Llama: 128 of 128 greedy tokens are those of Hugging Face `generate`.
"""

from __future__ import annotations

import json
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from serving import Generate, ModelOrder, converted, serve

DRAFT_TOKENS = 3
"A step; llama.cpp's own default."
SLOT_TOKENS = 256
"A slot's context is a multiple of it."
PRECISIONS = {"float32": "F32", "bfloat16": "BF16"}


def load(order: ModelOrder) -> tuple[str, Generate]:
    """Start the server on a port that is free."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    precision = PRECISIONS[order.dtype]
    params = xllamacpp.CommonParams()
    if precision == "F32":
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.model.path = gguf_file(order.model, precision)
    params.n_parallel = order.max_batch
    params.n_ctx = order.max_batch * -(-order.max_total_tokens // SLOT_TOKENS) * SLOT_TOKENS
    params.cache_ram_mib = 0
    parts = [params]
    if order.draft is not None:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = gguf_file(order.draft, precision), DRAFT_TOKENS
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        parts.append(draft)
    for part in parts:
        if precision == "F32":
            part.cache_type_k = part.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = order.threads
    server = xllamacpp.Server(params)

    def generate(prompts: list[list[int]], max_new_tokens: int, temperature: float) -> list[list[int]]:
        asked = {
            "prompt": prompts,
            "n_predict": max_new_tokens,
            "return_tokens": True,
            "cache_prompt": False,
            "temperature": temperature,
            "top_k": 0 if temperature > 0 else 1,
            "samplers": ["top_k", "temperature"],
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            results = json.load(response)
        results = results if isinstance(results, list) else [results]
        return [result["tokens"] for result in sorted(results, key=lambda result: result["index"])]

    return version("xllamacpp"), generate


def gguf_file(model: Path, precision: str) -> str:
    """Return the checkpoint as a GGUF file, written when it is not there."""
    folder = converted(model, f"gguf-{precision}", lambda folder: write_gguf(model, folder, precision))
    return str(folder / "model.gguf")


def write_gguf(model: Path, folder: Path, precision: str) -> None:
    """Write a Llama's checkpoint as GGUF. Raises ValueError for what the file would not say."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    if config["model_type"] != "llama" or (rope.get("rope_type") or "default") != "default":
        raise ValueError(f"expected a plain Llama, got {config['model_type']} with rope {rope}")
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    # an id's digits are its name; of the vocabularies that are lists of names, one in which none ends a text
    writer.add_tokenizer_model("bert")
    writer.add_token_list([str(token) for token in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    kind = gguf.GGMLQuantizationType[precision]
    for path in sorted(model.glob("*.safetensors")):
        for key, rows in load_file(path).items():
            name = names.get_name(key, try_suffixes=(".weight",))
            if name is None:
                raise ValueError(f"{path} has {key}, for which a GGUF file of a Llama has no name")
            if rows.ndim == 1:
                writer.add_tensor(name, rows)
                continue
            for part, count in (("attn_q.", heads), ("attn_k.", kv_heads)):
                rows = interleaved(rows, count) if part in name else rows
            writer.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(rows: Any, heads: int) -> Any:
    """Put the two halves of each head that rotate together side by side, as llama.cpp rotates them."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    serve(load)
