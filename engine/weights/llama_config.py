"""What a config says of a Llama, Mistral, Qwen2 or Qwen3: names and shapes of its weights, windows, rotations.

`engine.model.llama_model` holds such weights. Nothing here imports transformers, which takes longer than all the rest
of an instance's start, but for models that stretch their context.
"""

from __future__ import annotations

import json
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import ModelError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MAX_LAYERS = 10_000
"Above all there are; a mistyped number would be built for hours."
HEAD, EMBEDDING, FINAL_NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


class LlamaConfig(SimpleNamespace):
    """A Hugging Face config's values, read from its JSON."""

    @staticmethod
    def of(hf_config_json: str, **changes: Any) -> LlamaConfig:
        """Read a config. Raises ModelError: it is not one of these families', or what it says does not go together."""
        config = LlamaConfig(**(json.loads(hf_config_json) | changes))
        try:
            _require_known(config)
            weight_shapes(config)
            Rotary(config)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"no Llama or kin can be made of this config ({type(error).__name__}: {error})"
            ) from error
        return config

    def get_text_config(self) -> LlamaConfig:
        """These models have no other part."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """All values."""
        return dict(vars(self))

    def to_json_string(self, use_diff: bool = False) -> str:
        """All values as JSON; `use_diff` is for likeness."""
        return json.dumps(vars(self), indent=2, sort_keys=True) + "\n"


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, under its published name and in the order of names; tied ones once, by the first name."""
    hidden, inner, kind = config.hidden_size, config.intermediate_size, config.model_type
    size = head_size(config)
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    has_bias = kind == "qwen2" or (kind in ("llama", "qwen3") and bool(config.attention_bias))
    mlp_has_bias = kind == "llama" and bool(config.mlp_bias)
    products = {
        "self_attn.q_proj": (queries, hidden, has_bias),
        "self_attn.k_proj": (keys, hidden, has_bias),
        "self_attn.v_proj": (keys, hidden, has_bias),
        # Qwen2's has none
        "self_attn.o_proj": (hidden, queries, has_bias and kind != "qwen2"),
        "mlp.gate_proj": (inner, hidden, mlp_has_bias),
        "mlp.up_proj": (inner, hidden, mlp_has_bias),
        "mlp.down_proj": (hidden, inner, mlp_has_bias),
    }
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape[:2] for name, shape in products.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in products.items() if shape[2]}
    layer |= {f"{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    if kind == "qwen3":
        layer |= {f"self_attn.{norm}.weight": (size,) for norm in ("q_norm", "k_norm")}
    shapes: dict[str, tuple[int, ...]] = {
        HEAD: (getattr(config, "num_outputs", config.vocab_size), hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if any(size < 1 for shape in shapes.values() for size in shape):
        raise ValueError(f"sizes that are not positive: {config.hidden_size}, {inner}, {queries}, {keys}")
    return dict(sorted(shapes.items()))


class Rotary(nn.Module):
    """Frequencies of the rotary positions: Su et al. 2021, 'RoFormer', section 3.2.2; scaled ones by transformers."""

    inv_freq: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        rope, size = config.rope_parameters, head_size(config)
        with torch.device("cpu"):
            if rope["rope_type"] == "default":
                exponents = torch.arange(0, size, 2, dtype=torch.float) / size
                frequencies, scaling = 1.0 / rope["rope_theta"] ** exponents, 1.0
            else:
                frequencies, scaling = _scaled_frequencies(config)
        self.attention_scaling: float = scaling
        self.register_buffer("inv_freq", frequencies, persistent=False)


def _scaled_frequencies(config: LlamaConfig) -> tuple[Tensor, float]:
    # a second of import, and only for models that stretch their context
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stock = AutoConfig.for_model(**config.to_dict())
    return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](stock)


def head_size(config: LlamaConfig) -> int:
    """Of one head: a config may leave it out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: LlamaConfig, index: int) -> int | None:
    """The window as transformers takes it: Llama never, Mistral from the config, Qwen layer by layer."""
    if config.model_type == "mistral":
        return config.sliding_window
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "llama" or not kinds:
        return None
    return config.sliding_window if kinds[index] == "sliding_attention" else None


def _require_known(config: LlamaConfig) -> None:
    """Raise ValueError for a config that describes more than our forward computes."""
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"model_type '{config.model_type}'")
    if not 0 < config.num_hidden_layers <= MAX_LAYERS:
        raise ValueError(f"{config.num_hidden_layers} layers")
    if not all(0 < one < inf for one in (config.rms_norm_eps, config.rope_parameters["rope_theta"])):
        raise ValueError("rms_norm_eps and rope_theta that are not positive")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantized")
    if "head_dim" not in vars(config) and config.hidden_size % config.num_attention_heads:
        raise ValueError(f"{config.num_attention_heads} heads in a hidden size of {config.hidden_size}")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act '{config.hidden_act}'")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(f"{config.num_attention_heads} heads over {config.num_key_value_heads} KV heads")
    if float(config.rope_parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("its rotary positions turn a part of each head")
