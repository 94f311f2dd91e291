"""A head that nobody has trained yet, for a target: its vocabulary from data, its weights from the target's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.drafters.head.config_keys import ROPE_NEEDS, rope_of
from rlhfspec.engine.drafters.head.head_weights import (
    LAYER,
    HeadConfig,
    HeadWeights,
    default_taps,
    vocabulary_tensors,
)
from rlhfspec.engine.weights.bare_llama import MODEL_TYPES
from rlhfspec.engine.weights.causal_lm import CausalLM

DRAFT_VOCABULARY = 8192


def draft_vocabulary(
    size: int,
    vocab_size: int,
    *,
    counts: Tensor | None = None,
    responses: Iterable[np.ndarray] = (),
    prompts: Iterable[np.ndarray] = (),
    always: Sequence[int] = (),
) -> Int[Tensor, " D"]:
    """Return the target's ids that a head may draft, ascending: `size` of them, of the lowest `vocab_size`.

    First `always` (the stop tokens); then the most frequent of the target's own responses, by `counts` [V] where they
    are given (`token_shares.expected_counts`), else in `responses`; then those of the prompts, and the lowest ids. Of
    equally frequent ones the lower id.
    """
    size = min(size, vocab_size)
    chosen = dict.fromkeys(token for token in always if 0 <= token < vocab_size)
    for found in (
        _counted(responses, vocab_size) if counts is None else counts,
        _counted(prompts, vocab_size),
    ):
        by_count = torch.sort(found[:vocab_size], descending=True, stable=True)
        chosen |= dict.fromkeys(by_count.indices[by_count.values > 0].tolist())
    chosen |= dict.fromkeys(range(vocab_size))
    return torch.tensor(sorted(list(chosen)[:size]), dtype=torch.int64)


def _counted(texts: Iterable[np.ndarray], vocab_size: int) -> Tensor:
    joined = [*texts, np.zeros(0, dtype=np.int64)]
    return torch.bincount(torch.from_numpy(np.concatenate(joined).astype(np.int64)), minlength=vocab_size)


def fresh_head(
    target: CausalLM, token_ids: Int[Tensor, " D"], *, taps: Sequence[int] | None = None, seed: int = 0
) -> HeadWeights:
    """Return a head for a target, over a draft vocabulary.

    Output rows and norm are the target's. The layer begins as the target's last one, which reads hidden states alone;
    what reads the token's embedding begins small and random; `fc` passes the highest tapped state through.
    Raises ModelError for a target whose layers are not Llama's or its kin's.
    """
    config = head_config(target, len(token_ids), taps=taps)
    base: Any = target.base_model
    hidden = config.hidden_size
    random = torch.Generator().manual_seed(seed)
    layer = base.layers[-1]
    tensors: dict[str, Tensor] = {}
    fc = torch.zeros(hidden, len(config.tapped_layers) * hidden)
    fc[:, -hidden:] = torch.eye(hidden)
    tensors["fc.weight"] = fc
    tensors[LAYER + "input_layernorm.weight"] = torch.ones(hidden)
    tensors[LAYER + "hidden_norm.weight"] = layer.input_layernorm.weight
    for name in ("q", "k", "v"):
        own: Tensor = getattr(layer.self_attn, f"{name}_proj").weight
        of_embedding = torch.randn(own.shape, generator=random) * 0.02
        tensors[LAYER + f"self_attn.{name}_proj.weight"] = torch.cat([of_embedding, own.cpu().float()], dim=1)
    tensors[LAYER + "self_attn.o_proj.weight"] = layer.self_attn.o_proj.weight
    tensors[LAYER + "post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
    for name in ("gate", "up", "down"):
        tensors[LAYER + f"mlp.{name}_proj.weight"] = getattr(layer.mlp, f"{name}_proj").weight
    tensors["norm.weight"] = base.norm.weight
    tensors["lm_head.weight"] = target.get_output_embeddings().weight[token_ids]
    made = {name: tensor.detach().cpu().float().clone() for name, tensor in tensors.items()}
    return HeadWeights(config=config, tensors=made | vocabulary_tensors(token_ids, config.vocab_size))


def head_config(target: CausalLM, draft_vocab_size: int, *, taps: Sequence[int] | None = None) -> HeadConfig:
    """Sizes of a head with a layer like the target's. Raises ModelError as `fresh_head`."""
    base: Any = target.base_model
    config: Any = target.config.get_text_config()
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    if (
        layers is None
        or norm is None
        or not hasattr(layers[-1], "mlp")
        or not hasattr(layers[-1].mlp, "gate_proj")
    ):
        raise ModelError(
            f"no draft head can be made for a {type(target).__name__}: expected layers as Llama, Mistral and Qwen have "
            "them (layers, norm, gated mlp); draft with speculation.drafter=suffix"
        )
    attention = layers[-1].self_attn
    size: int = attention.head_dim
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=layers[-1].mlp.gate_proj.weight.shape[0],
        num_heads=attention.q_proj.weight.shape[0] // size,
        num_kv_heads=attention.k_proj.weight.shape[0] // size,
        head_size=size,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        tapped_layers=tuple(taps) if taps is not None else default_taps(len(layers)),
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=_rope_of(config),
        max_position_embeddings=config.max_position_embeddings,
        num_target_layers=len(layers),
    )


def require_kin(target: CausalLM) -> None:
    """Raise ModelError for a target whose distribution is not `softmax(lm_head(norm(last)))`, or is not known to be.

    Names alone do not tell: Gemma's norm adds 1 to its gain, and its logits are capped; Granite's are divided.
    """
    kind = target.config.get_text_config().model_type
    if kind not in MODEL_TYPES:
        raise ModelError(
            f"no draft head can be made or trained for a '{kind}' model: expected one of {', '.join(MODEL_TYPES)}, "
            "whose last norm and output a head can learn from; draft with speculation.drafter=suffix, or take a head "
            "that others trained and set drafter_training.spot: off"
        )


def _rope_of(config: Any) -> dict[str, Any]:
    """The target's where its frequencies are the same at every length, else plain ones of the same base."""
    rope = rope_of(config.rope_parameters or {})
    return rope if rope.get("rope_type", "default") in ROPE_NEEDS else {"rope_theta": rope["rope_theta"]}
