"""A config.json is read whole: what its class has no name for is told, and both forms of rope say one thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from rlhfspec.core.errors import ModelError
from rlhfspec.core.surfaces.surface import note_once
from rlhfspec.engine.weights.config_json import write_older_names
from rlhfspec.engine.weights.loading import load_hf_config

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 8,
    "intermediate_size": 8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EVERYBODYS = {
    "architectures": ["A"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "tie_word_embeddings": True,
}
MOST_USED: dict[str, dict[str, Any]] = {
    "llama 3": {
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "attention_bias": False,
        "head_dim": 16,
    }
    | {"pretraining_tp": 1, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "qwen 2.5": {
        "model_type": "qwen2",
        "sliding_window": 64,
        "use_sliding_window": False,
        "max_window_layers": 1,
    }
    | {"rope_theta": 1e6, "use_mrope": False},
    "qwen 3": {"model_type": "qwen3", "attention_bias": False, "head_dim": 16, "sliding_window": None}
    | {"max_window_layers": 1, "use_sliding_window": False, "rope_theta": 1e6, "rope_scaling": None},
    "mistral": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6, "head_dim": 16},
    "gemma 2": {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    | {
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
    }
    | {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e4},
    "gemma 3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "head_dim": 16,
    }
    | {
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 1e4,
        "rope_theta": 1e6,
        "hidden_activation": "gelu",
    }
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid"},
    "phi 3": {"model_type": "phi3", "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False}
    | {"original_max_position_embeddings": 64, "sliding_window": 64, "rope_theta": 1e4, "pad_token_id": 0}
    | {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
    "phi 4": {
        "model_type": "phi3",
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "mlp_bias": False,
    }
    | {"lm_head_bias": False, "partial_rotary_factor": 0.75, "pad_token_id": 0, "rope_theta": 1e4},
    "smollm 2": {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_theta": 1e5}
    | {"transformers.js_config": {"dtype": "q4"}, "_name_or_path": "a/b", "pretraining_tp": 1},
    "smollm 3": {
        "model_type": "smollm3",
        "no_rope_layers": [1],
        "no_rope_layer_interval": 4,
        "rope_theta": 5e6,
    }
    | {
        "layer_types": ["full_attention"],
        "max_window_layers": 1,
        "use_sliding_window": False,
        "mlp_bias": False,
    }
    | {"attention_bias": False, "pretraining_tp": 2, "_attn_implementation_autoset": True},
    "olmo 2": {"model_type": "olmo2", "attention_bias": False, "hidden_act": "silu", "rope_theta": 5e5},
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0,
        "mlp_bias": False,
    }
    | {"logits_scaling": 8.0, "residual_multiplier": 0.2, "attention_bias": False, "rope_theta": 1e4},
    "deepseek r1 distill": {
        "model_type": "qwen2",
        "use_mrope": False,
        "use_sliding_window": False,
        "rope_theta": 1e4,
    },
}


def write(folder: Path, tree: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(tree))
    return str(folder)


@pytest.mark.parametrize("which", MOST_USED)
def test_nothing_is_said_of_the_most_used_models(tmp_path: Path, caplog: Any, which: str) -> None:
    note_once.cache_clear()
    load_hf_config(write(tmp_path, EVERYBODYS | SIZES | MOST_USED[which]))
    assert not [
        record.getMessage() for record in caplog.records if "nothing here reads" in record.getMessage()
    ]


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_a_mixture_is_read_by_either_name_of_its_experts(tmp_path: Path, caplog: Any, name: str) -> None:
    note_once.cache_clear()
    mixture = {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 16,
        name: 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    }
    config = load_hf_config(write(tmp_path, SIZES | mixture))
    assert config.num_experts == 4 and not [one for one in caplog.records if "head_dim" in one.getMessage()]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sliding_window": 64}, "'sliding_window', which cannot be taken into account"),
        ({"logits_scaling": 8.0}, "'logits_scaling': expected none or 1.0, got 8.0"),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "has rope_theta 1000000.0 and rope_parameters.rope_theta 10000.0",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 4.0, "rope_theta": 1e4}},
            "has rope_scaling.factor 8.0 and rope_parameters.factor 4.0",
        ),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "has dtype .float32. and torch_dtype"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_hf_config(write(tmp_path, SIZES | {"model_type": "llama"} | more))


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3])
def test_a_saved_config_has_the_names_that_older_readers_look_for(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    config = LlamaConfig(**SIZES, rope_parameters=rope | {"rope_theta": 5e5}, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    write_older_names(tmp_path / "config.json")
    tree = json.loads((tmp_path / "config.json").read_text())
    assert tree["rope_theta"] == 5e5 and tree["torch_dtype"] == tree["dtype"] == "bfloat16"
    assert tree["rope_scaling"] == (None if rope == {"rope_type": "default"} else rope)
    read = load_hf_config(str(tmp_path))
    assert read.rope_parameters == config.rope_parameters and str(read.dtype) == "torch.bfloat16"
