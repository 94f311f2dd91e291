"""A Llama's weights, or those of its kin, as a module without a forward: named and shaped as transformers does it.

Our own forward (`engine.model.llama_forward`) takes no more of a model. Importing transformers' module costs an
instance longer than all the rest of its start, so where a model of the same config has been compared with that module
before (`engine.model.kept_verdicts`), this one stands in. `same_model` says whether it may.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights.causal_lm import CausalLM
from rlhfspec.engine.weights.chunks import unique_tensors

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"Of `engine.model.llama_forward`."


class BareConfig(SimpleNamespace):
    """A Hugging Face config's values, read from its JSON."""

    def get_text_config(self) -> BareConfig:
        """These models have no other part."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """All values."""
        return dict(vars(self))

    def to_json_string(self, use_diff: bool = False) -> str:
        """All values as JSON; `use_diff` is for likeness."""
        return json.dumps(vars(self), indent=2, sort_keys=True) + "\n"


class BareLlama(nn.Module):
    """Weights without a forward."""

    _supports_attention_backend = True

    def __init__(self, config: BareConfig, dtype: torch.dtype) -> None:
        """Make uninitialised weights on torch's default device.

        Raises ModelError: the config is not one of these families', or what it says does not go together.
        """
        super().__init__()
        try:
            _require_known(config)
            self.config = config
            self.model = _Decoder(config, dtype)
            self.lm_head = _linear(config.hidden_size, config.vocab_size, False, dtype)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"no bare module can be made of this config ({type(error).__name__}: {error})"
            ) from error
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.eval().requires_grad_(False)

    @property
    def base_model(self) -> nn.Module:
        """The decoder below the head."""
        return self.model

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.lm_head.weight.device

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head


def bare_llama(hf_config_json: str, dtype: torch.dtype) -> BareLlama:
    """Make the weights that a published config describes, uninitialised. Raises ModelError as `BareLlama`."""
    return BareLlama(BareConfig(**json.loads(hf_config_json)), dtype)


def same_model(bare: BareLlama, stock: CausalLM) -> bool:
    """Whether our forward would compute the same from both, given equal weights: names, shapes, windows, rotations."""
    ours, theirs = _layout(bare), _layout(stock)
    own_layers: Any = bare.model.layers
    layers = zip(own_layers, stock.base_model.layers, strict=False)
    return (
        ours == theirs
        and all(
            own.self_attn.head_dim == other.self_attn.head_dim
            and own.self_attn.sliding_window == getattr(other.self_attn, "sliding_window", None)
            for own, other in layers
        )
        and torch.equal(bare.model.rotary_emb.inv_freq, stock.base_model.rotary_emb.inv_freq.cpu())
        and bare.model.rotary_emb.attention_scaling == stock.base_model.rotary_emb.attention_scaling
    )


def _layout(model: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in unique_tensors(model)]


class _Decoder(nn.Module):
    def __init__(self, config: BareConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = _Gain(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(_Layer(config, index, dtype) for index in range(config.num_hidden_layers))
        self.norm = _Gain(config.hidden_size, dtype=dtype)
        self.rotary_emb = Rotary(config)

    def get_input_embeddings(self) -> nn.Module:
        """By token id, as transformers names it; a draft head reads it."""
        return self.embed_tokens


class _Layer(nn.Module):
    def __init__(self, config: BareConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index, dtype)
        self.mlp = _Mlp(config, dtype)
        self.input_layernorm = _Gain(config.hidden_size, dtype=dtype)
        self.post_attention_layernorm = _Gain(config.hidden_size, dtype=dtype)


class _Attention(nn.Module):
    def __init__(self, config: BareConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        kind, hidden = config.model_type, config.hidden_size
        self.head_dim = size = _head_size(config)
        self.sliding_window = _sliding_window(config, index)
        has_bias = kind == "qwen2" or bool(getattr(config, "attention_bias", False))
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = _linear(hidden, queries, has_bias, dtype)
        self.k_proj = _linear(hidden, keys, has_bias, dtype)
        self.v_proj = _linear(hidden, keys, has_bias, dtype)
        self.o_proj = _linear(queries, hidden, has_bias and kind != "qwen2", dtype)
        if kind == "qwen3":
            self.q_norm, self.k_norm = _Gain(size, dtype=dtype), _Gain(size, dtype=dtype)


class _Mlp(nn.Module):
    def __init__(self, config: BareConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        has_bias = config.model_type == "llama" and bool(config.mlp_bias)
        self.gate_proj = _linear(hidden, inner, has_bias, dtype)
        self.up_proj = _linear(hidden, inner, has_bias, dtype)
        self.down_proj = _linear(inner, hidden, has_bias, dtype)


class _Gain(nn.Module):
    """A tensor called `weight`: of a norm, or the table of embeddings."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Rotary(nn.Module):
    """Frequencies of the rotary positions: Su et al. 2021, 'RoFormer', section 3.2.2; scaled ones by transformers."""

    inv_freq: Tensor

    def __init__(self, config: BareConfig) -> None:
        super().__init__()
        rope, size = config.rope_parameters, _head_size(config)
        with torch.device("cpu"):
            if rope["rope_type"] == "default":
                exponents = torch.arange(0, size, 2, dtype=torch.float) / size
                frequencies, scaling = 1.0 / rope["rope_theta"] ** exponents, 1.0
            else:
                frequencies, scaling = _scaled_frequencies(config)
        self.attention_scaling: float = scaling
        self.register_buffer("inv_freq", frequencies, persistent=False)


def _scaled_frequencies(config: BareConfig) -> tuple[Tensor, float]:
    # a second of import, and only for models that stretch their context
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stock = AutoConfig.for_model(**config.to_dict())
    return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](stock)


def _linear(inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype) -> nn.Linear:
    """A linear without the seconds that drawing its first weights would take."""
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=has_bias, dtype=dtype)
    assert isinstance(linear, nn.Linear)
    return linear


def _head_size(config: BareConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _sliding_window(config: BareConfig, index: int) -> int | None:
    """As the stock module of each layer has it."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type not in ("qwen2", "qwen3") or not kinds:
        return None
    return config.sliding_window if kinds[index] == "sliding_attention" else None


def _require_known(config: BareConfig) -> None:
    """Raise ValueError for a config that describes more than these modules hold."""
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"model_type '{config.model_type}'")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantized")
    if "head_dim" not in vars(config) and config.hidden_size % config.num_attention_heads:
        raise ValueError(f"{config.num_attention_heads} heads in a hidden size of {config.hidden_size}")
