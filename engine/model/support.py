"""Which architectures the runner can serve: what is known to go wrong is refused, the rest is compared.

A registered attention function is enough for most causal LMs. It is not for those that ignore it, that pass
more than keys and values (sinks, latent caches), that rely on a mask we do not build (chunked attention), or
whose positions depend on the longest neighbour (dynamic rope). Whatever passes these checks decodes a little at
start-up (`engine.model.comparison`), so that an unknown architecture fails there and not in its samples.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.errors import ModelError, WeightsError
from ..weights.causal_lm import CausalLM


def refuse_unsupported(model: CausalLM, capacity: int) -> None:
    """Raise ModelError, saying why, for an architecture that would run and be wrong."""
    config: dict[str, Any] = model.config.get_text_config().to_dict()
    reasons = {
        "it does not take a registered attention function": isinstance(model, nn.Module)
        and not getattr(model, "_supports_attention_backend", False),
        "it compresses keys and values into latents": bool(config.get("kv_lora_rank")),
        "its chunked attention needs a mask of its own": bool(config.get("attention_chunk_size")),
        "it has attention sinks": isinstance(model, nn.Module)
        and any(name.endswith(".sinks") for name, _ in model.named_parameters()),
    }
    for reason, holds in reasons.items():
        if holds:
            raise unsupported(model, reason)
    refuse_changing_rope(
        model, capacity, "prompt, response, drafts", "sampling.max_new_tokens or data.max_prompt_tokens"
    )


def refuse_changing_rope(model: CausalLM, capacity: int, what: str, keys: str) -> None:
    """Raise ModelError where rotary positions would depend on the longest neighbour; `keys` bound `capacity`."""
    limit = _rope_changes_at(model.config.get_text_config().to_dict())
    if limit is not None and capacity > limit:
        kind = (getattr(model.config, "architectures", None) or [type(model).__name__])[0]
        raise ModelError(
            f"{kind} is not supported at this length: its rotary positions change for a whole batch "
            f"whose longest sample has more than {limit} tokens, and one may have {capacity} here ({what}); lower "
            f"{keys}, or take a model of another family"
        )


def switch_attention(model: Any, name: str) -> None:
    """Let every attention layer of a model call the function registered as `name`.

    Raises ModelError unless the model's config, and the one that its layers read, say so afterwards: libraries warn
    or go on with what they had where they cannot switch.
    """
    model.set_attn_implementation(name)
    for config in (model.config, model.config.get_text_config()):
        got = config._attn_implementation
        if got != name:
            raise unsupported(
                model, f"its attention was to be {name!r}, and is {got!r} after it was switched"
            )


def unsupported(model: nn.Module | CausalLM, reason: str) -> ModelError:
    """Return the error for an architecture, or a layer of one, that cannot be served."""
    return ModelError(f"{type(model).__name__} is not supported: {reason}; take a model of another family")


def not_held(who: str, copy: str) -> WeightsError:
    """Return the error for a copy that decodes and is not, bit for bit, what it was made of."""
    return WeightsError(
        f"{who}: the copy of {copy} that decodes was expected to hold the loaded weights bit by bit, and does not; "
        "they are not confirmed: start the instance again, and test its machine's memory if this repeats"
    )


def _rope_changes_at(config: dict[str, Any]) -> int | None:
    """The length of a sample up to which rotary positions are the same for any batch; None: they always are."""
    rope = config.get("rope_parameters") or {}
    layers = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    limits = [
        layer.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings", config.get("max_position_embeddings", 0))
        for layer in layers
        if layer.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)
