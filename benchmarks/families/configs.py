"""Small models of any causal family: config fields are recognised by name, what is special stands in one table.

A model has two layers (more where a family mixes more kinds), 307 token ids and hidden size 64. Its weights
are random, seeded, and of a size that makes every layer and the context matter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhfspec.engine.weights.loading import freeze

VOCAB_SIZE = 307
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 2, 64, 4, 2, 16
POSITIONS = 256
LOGIT_SPREAD = 2.5
"Standard deviation of a position's logits."

_SIZES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (VOCAB_SIZE, ("vocab_size", "text_vocab_size")),
    (
        LAYERS,
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
        ),
    ),
    (
        HIDDEN,
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "embedding_size",
            "embed_dim",
            "dim",
            "emb_dim",
            "word_embed_proj_dim",
            "lru_width",
            "mamba_d_ssm",
            "input_embedding_size",
            "output_embedding_size",
            "attention_hidden_size",
        ),
    ),
    (
        HEADS,
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "swa_num_attention_heads",
            "linear_num_value_heads",
            "index_n_heads",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "mamba_d_state",
        ),
    ),
    (
        KV_HEADS,
        (
            "num_key_value_heads",
            "num_kv_heads",
            "swa_num_key_value_heads",
            "num_global_key_value_heads",
            "linear_num_key_heads",
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_k",
            "moe_topk",
            "moe_top_k",
            "top_k_experts",
        ),
    ),
    (
        HEAD_SIZE,
        (
            "head_dim",
            "d_kv",
            "kv_channels",
            "attention_head_dim",
            "attention_head_size",
            "global_head_dim",
            "swa_head_dim",
            "swa_v_head_dim",
            "v_head_dim",
            "kv_lora_rank",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "query_pre_attn_scalar",
            "sliding_window",
            "index_head_dim",
            "rotary_dim",
            "hidden_size_per_layer_input",
            "mamba_head_dim",
            "ssm_state_size",
            "state_size",
            "time_step_rank",
        ),
    ),
    (8, ("qk_nope_head_dim", "qk_rope_head_dim", "laurel_rank", "index_topk")),
    (24, ("q_lora_rank",)),
    (32, ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")),
    (
        96,
        (
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "d_ff",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "ffn_hidden_size",
            "expert_ffn_hidden_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
        ),
    ),
    (POSITIONS, ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")),
    (
        1,
        (
            "n_group",
            "topk_group",
            "n_shared_experts",
            "num_shared_experts",
            "first_k_dense_replace",
            "moe_num_shared_experts",
            "num_nextn_predict_layers",
            "bos_token_id",
        ),
    ),
    (0, ("pad_token_id",)),
    (2, ("eos_token_id",)),
)
BY_NAME = {name: size for size, names in _SIZES for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One small model: a model type, what its config says besides the usual sizes, and what is tried by it."""

    model_type: str
    variant: str = ""
    "what is special; empty: the family as it is"
    settings: dict[str, Any] = field(default_factory=dict)
    forward: Literal["auto", "stock"] = "auto"

    @property
    def name(self) -> str:
        """The model type and the variant."""
        return f"{self.model_type}, {self.variant}" if self.variant else self.model_type


def small_config(model_type: str, settings: dict[str, Any]) -> PretrainedConfig:
    """Return a config of a family with every known size made small; `settings` win."""
    return _shrunk(CONFIG_MAPPING[model_type], settings)


def _shrunk(kind: type[PretrainedConfig], settings: dict[str, Any]) -> PretrainedConfig:
    try:
        usual = kind()
    except Exception:  # some have no valid config of their own
        usual = kind(**settings)
    known = usual.to_dict()
    sizes: dict[str, Any] = {
        name: size
        for name, size in BY_NAME.items()
        if name in known and (isinstance(known[name], int | float) or known[name] is None)
    }
    sizes = {n: s for n, s in sizes.items() if not isinstance(known[n], bool)}
    # sizes that are off by default stay off
    for name in ("kv_lora_rank", "q_lora_rank", "sliding_window", "head_dim", "rotary_dim", "n_inner"):
        if name in sizes and known[name] in (None, 0):
            del sizes[name]
    if known.get("tie_word_embeddings"):
        sizes["tie_word_embeddings"] = False
    if known.get("kv_lora_rank"):
        # one latent for all heads; what turns is the rotary part of a head
        sizes["num_key_value_heads"] = HEADS
        sizes.pop("head_dim", None)
    if "is_decoder" in known:
        sizes["is_decoder"] = True
    kinds = known.get("layer_types")
    if isinstance(kinds, list) and kinds:
        distinct = list(dict.fromkeys(kinds))
        num_layers = settings.get("num_hidden_layers", max(LAYERS, len(distinct)))
        sizes["num_hidden_layers"] = num_layers
        sizes["layer_types"] = [distinct[i % len(distinct)] for i in range(num_layers)]
    parts: dict[str, Any] = kind.sub_configs  # type: ignore[assignment]
    for name in parts:
        if isinstance(getattr(usual, name, None), PretrainedConfig):
            # the kind that is meant where the class says "any"
            sizes[name] = _shrunk(type(getattr(usual, name)), settings.get(name, {})).to_dict()
    return kind(**(sizes | {k: v for k, v in settings.items() if k not in parts}))


def build_model(family: Family) -> PreTrainedModel:
    """Return a family's small model with random weights, the same every time, in eval mode."""
    torch.manual_seed(0)
    config = small_config(family.model_type, family.settings)
    model = freeze(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    generator = torch.Generator().manual_seed(1)
    done: set[int] = set()
    for weight in model.parameters():
        if weight.data_ptr() in done:
            continue
        done.add(weight.data_ptr())
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() >= 2:
            weight.copy_(noise * 1.2 / weight.shape[-1] ** 0.5)
        else:
            weight.add_(noise * 0.1)
    ids = torch.randint(3, VOCAB_SIZE, (1, 24), generator=generator)
    with torch.inference_mode():
        spread = float(model(input_ids=ids, use_cache=False).logits.std(-1).mean())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    # a tied one is left alone: it would drown the layers in the residual stream
    if head is not None and head.weight is not embedding.weight:
        head.weight.mul_(LOGIT_SPREAD / spread)
    return model


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Return a draft model: a copy whose matrices are a little off."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    for weight in draft.parameters():
        if weight.dim() >= 2:
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * 0.1)
    return draft
