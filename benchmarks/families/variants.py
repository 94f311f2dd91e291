"""What is tried: every causal family of the installed transformers, and variants of some.

`NEEDS` says what a family's config needs besides the usual small sizes.
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.families.configs import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB_SIZE, Family

_PER_HEAD = {"num_key_value_heads": HEADS}
_ALL_ATTEND = {"layer_types": ["full_attention"] * LAYERS}
_ALL_SHARED = {
    "text_config": {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_hidden_layers": LAYERS,
        "num_kv_shared_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB_SIZE,
    }
}
_DOTS3 = {
    **_PER_HEAD,
    **{f"swa_{name}": HEADS for name in ("num_attention_heads", "num_key_value_heads")},
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
    "shared_experts_intermediate_size": 32,
    "head_dim": 16,
}
_QWEN4 = {
    "num_experts_per_tok": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
    "ngram_vocab_size_base": 97,
    "split_ngram_parts": 1,
    "ple_layer_ids": [],
}
_BLT = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
_BLT_LOCAL = _BLT | {"vocab_size": VOCAB_SIZE, "hidden_size_global": HIDDEN}

NEEDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "num_experts": 4},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "attn_layer_indices": [1]},
    "blt": {
        "patcher_config": _BLT | {"vocab_size": VOCAB_SIZE},
        "encoder_config": _BLT_LOCAL,
        "decoder_config": _BLT_LOCAL,
        "global_config": _BLT,
        "encoder_hash_byte_group_vocab": 307,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"num_hidden_layers": 42, "adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB_SIZE},
    "gemma4": {"text_config": {"global_head_dim": HEAD_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE}},
    "gemma4_assistant": _ALL_SHARED,
    "gemma4_text": {"global_head_dim": HEAD_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE},
    "gemma4_unified": {"text_config": {"global_head_dim": HEAD_SIZE}},
    "gemma4_unified_assistant": _ALL_SHARED,
    "gemma4_unified_text": {"global_head_dim": HEAD_SIZE},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": HEAD_SIZE},
    "granitemoehybrid": _ALL_ATTEND | {"mamba_n_heads": 4, "shared_intermediate_size": 32},
    "hunyuan_v1_dense": {"head_dim": HEAD_SIZE},
    "hunyuan_v1_moe": {"head_dim": HEAD_SIZE},
    "lfm2": _ALL_ATTEND,
    "lfm2_moe": _ALL_ATTEND | {"num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "ministral": {"head_dim": HEAD_SIZE},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        **_PER_HEAD,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 4,
        "adapter_rank": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

_TYPES = ["sliding_attention", "full_attention"]


def _heads(num: int, num_kv: int, size: int) -> dict[str, int]:
    return {
        "num_attention_heads": num,
        "num_key_value_heads": num_kv,
        "head_dim": size,
        "hidden_size": num * size,
    }


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bert", "not as a decoder", {"is_decoder": False}),
    ("gemma2", "tied embeddings", {"tie_word_embeddings": True}),
    (
        "gemma3n_text",
        "layers that share keys and values",
        NEEDS["gemma3n_text"]
        | {"num_hidden_layers": 4, "layer_types": _TYPES * 2, "num_kv_shared_layers": 2},
    ),
    ("gemma4_text", "wider heads in global layers", NEEDS["gemma4_text"] | {"global_head_dim": 32}),
    (
        "gemma4_text",
        "layers that share keys and values",
        NEEDS["gemma4_text"] | {"num_hidden_layers": 4, "layer_types": _TYPES * 2, "num_kv_shared_layers": 2},
    ),
    (
        "gemma4_text",
        "mixture of experts",
        NEEDS["gemma4_text"]
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    ("gpt2", "scaled by layer", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_bigcode", "a KV head for each head", {"multi_query": False, "num_key_value_heads": HEADS}),
    ("gpt_bigcode", "a wrong num_key_value_heads", {"num_key_value_heads": 4}),
    (
        "granitemoehybrid",
        "with Mamba layers",
        NEEDS["granitemoehybrid"] | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    ("hrm_text", "causal prompts", {"prefix_lm": False}),
    ("jetmoe", "its own kv_channels of 128", {"kv_channels": 128}),
    ("lfm2", "with convolutions", {"layer_types": ["conv", "full_attention"]}),
    ("lfm2_moe", "with convolutions", NEEDS["lfm2_moe"] | {"layer_types": ["conv", "full_attention"]}),
    ("llama", "6 heads over 3", _heads(6, 3, 16)),
    ("llama", "3 heads over 1, size 10", _heads(3, 1, 10)),
    ("llama", "2 heads over 1, size 10", _heads(2, 1, 10)),
    ("llama", "6 heads over 2, size 20", _heads(6, 2, 20)),
    (
        "llama",
        "biases, tied embeddings",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    ("llama", "linear rope", _rope("linear", factor=4.0)),
    ("llama", "dynamic rope within its length", _rope("dynamic", factor=4.0)),
    (
        "llama",
        "dynamic rope beyond its length",
        _rope("dynamic", factor=4.0, original_max_position_embeddings=32),
    ),
    ("llama", "yarn rope", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    (
        "llama",
        "llama3 rope",
        _rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    ("llama", "partial rotary", _rope("default", partial_rotary_factor=0.5)),
    ("mistral", "window 16", {"sliding_window": 16}),
    ("mistral", "window 16, heads of 10", _heads(2, 1, 10) | {"sliding_window": 16}),
    ("mimo_v2_flash", "no sliding layers", {"layer_types": ["full_attention"] * LAYERS}),
    ("minimax", "attention in every layer", _ALL_ATTEND),
    ("olmo2", "2 heads over 1, size 10", _heads(2, 1, 10)),
    ("olmo2", "3 heads over 1, size 12", _heads(3, 1, 12)),
    ("opt", "norms behind, narrow embedding", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    ("phi3", "3 heads over 1, size 10", _heads(3, 1, 10)),
    (
        "qwen2",
        "a window in the upper layer",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    ("qwen2", "tied embeddings", {"tie_word_embeddings": True}),
    ("qwen3", "6 heads over 3, size 24", _heads(6, 3, 24)),
    ("qwen3", "heads wider than the hidden size", {"head_dim": 32}),
    ("roberta", "pad_token_id 1", {"pad_token_id": 1}),
)

QUICK = (
    "falcon",
    "gemma4_text, wider heads in global layers",
    "gpt2",
    "gpt_bigcode, a wrong num_key_value_heads",
    "jetmoe, its own kv_channels of 128",
    "lfm2, with convolutions",
    "llama, 3 heads over 1, size 10",
    "mistral, window 16",
    "mixtral",
    "nemotron",
    "roberta",
)
"One of each kind of outcome, and what was wrong once."
STOCK = ("llama", "mistral", "qwen2", "qwen3")


def all_families() -> list[Family]:
    """Return every family of the installed transformers and the variants, by name."""
    plain = [
        Family(model_type=name, settings=NEEDS.get(name, {})) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ]
    special = [
        Family(model_type=name, variant=variant, settings=settings) for name, variant, settings in VARIANTS
    ]
    stock = [Family(model_type=name, variant="forward: stock", forward="stock") for name in STOCK]
    return sorted([*plain, *special, *stock], key=lambda family: (family.model_type, family.variant))


def quick_families() -> list[Family]:
    """Return those of `QUICK`."""
    return [family for family in all_families() if family.name in QUICK]
