"""Which architectures the runner can serve: what is known to go wrong is refused, the rest is compared.

A registered attention function is enough for most causal LMs. It is not for those that ignore it, that pass
more than keys and values (sinks, latent caches), that rely on a mask we do not build (chunked attention), or
whose positions depend on the longest neighbour (dynamic rope). Whatever passes these checks is compared once with
its own plain forward, so that an unknown architecture fails at start-up and not in its samples.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from core.errors import ModelError

COMPARED_TOKENS = 96
PLAIN_ATTENTION = "eager"
TOLERATED_DISTANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"Largest total variation between the two forwards' distributions; bfloat16 rounds by up to 0.04 (measured)."


def refuse_unsupported(model: PreTrainedModel, capacity: int) -> None:
    """Raise ModelError, saying why, for an architecture that would run and be wrong."""
    config: dict[str, Any] = model.config.get_text_config().to_dict()
    reasons = {
        "it does not take a registered attention function": not model._supports_attention_backend,
        "it compresses keys and values into latents": bool(config.get("kv_lora_rank")),
        "its chunked attention needs a mask of its own": bool(config.get("attention_chunk_size")),
        "its rotary positions depend on the longest sample of the batch": _rope_depends_on_length(
            config, capacity
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise unsupported(model, reason)


def unsupported(model: PreTrainedModel, reason: str) -> ModelError:
    """Return the error for an architecture that cannot be served."""
    return ModelError(f"{type(model).__name__} is not supported: {reason}; take a model of another family")


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, ids: Tensor) -> Float[Tensor, "T V"]:
    """Run the model's own forward, with its own attention, over one sequence."""
    before = model.config._attn_implementation or PLAIN_ATTENTION
    model.set_attn_implementation(PLAIN_ATTENTION)
    logits = model(ids[None], use_cache=False).logits[0]
    model.set_attn_implementation(before)
    return logits


def require_equal(model: PreTrainedModel, plain: Tensor, served: Tensor) -> None:
    """Raise ModelError when the runner's distributions differ from the plain forward's beyond rounding."""
    distance = (plain.float().softmax(-1) - served.float().softmax(-1)).abs().sum(-1).max() / 2
    if not float(distance) <= TOLERATED_DISTANCE.get(model.dtype, 0.1):
        raise unsupported(
            model,
            f"its logits through our KV pool differ from its own forward's (total variation {float(distance):.1e})",
        )


def _rope_depends_on_length(config: dict[str, Any], capacity: int) -> bool:
    rope = config.get("rope_parameters") or {}
    layers = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for layer in layers:
        original = layer.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings", config.get("max_position_embeddings", 0)
        )
        if layer.get("rope_type") in ("dynamic", "longrope") and capacity > original:
            return True
    return False
