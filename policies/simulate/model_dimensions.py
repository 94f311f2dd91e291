"""What of a model decides its speed, read from the keys of a Hugging Face config: dense, grouped queries, experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.surfaces.surface import surface

MOST = 10**8
"Of any count in a config."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDimensions:
    """Counts of parameters; embedding tables are looked up, not read, unless they are the head too."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    attention: int
    "parameters of one layer's attention"
    dense: int
    "parameters of the feed-forward part that every token uses, of all layers together, routers included"
    expert: int = 0
    "parameters of one expert"
    experts: int = 0
    "of one layer that has some"
    experts_per_token: int = 0
    expert_layers: int = 0
    tied: bool = False

    @property
    def head(self) -> int:
        """Parameters of the language-model head."""
        return self.vocabulary * self.hidden

    @property
    def always_read(self) -> int:
        """Parameters that every forward reads: all but the experts and the table of embeddings."""
        return self.layers * self.attention + self.dense + self.head

    @property
    def all_experts(self) -> int:
        """Parameters of all experts."""
        return self.expert_layers * self.experts * self.expert

    @property
    def total(self) -> int:
        """All parameters."""
        return self.always_read + self.all_experts + (0 if self.tied else self.head)

    @property
    def active(self) -> int:
        """Parameters that multiply with a token."""
        return self.always_read + self.expert_layers * self.experts_per_token * self.expert

    def experts_read(self, tokens: float) -> float:
        """Expected parameters of the distinct experts that so many tokens use, each token's drawn evenly."""
        if not self.experts:
            return 0.0
        missed = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.all_experts * (1.0 - missed)

    def kv_bytes_per_token(self, number_bytes: float) -> float:
        """Keys and values of one token in all layers."""
        return 2.0 * self.layers * self.kv_heads * self.head_size * number_bytes


def dimensions_of(config: Mapping[str, Any], *, origin: str) -> ModelDimensions:
    """Read the keys of a config.json.

    Args:
        config: of a decoder; `text_config` within it is taken where there is one.
        origin: where they stand, for errors.

    Raises ConfigError for a key that is missing or no count, and for what is not modelled.
    """
    inner = config.get("text_config")
    keys = inner if isinstance(inner, Mapping) else config
    surface("simulated.config").require(keys, origin, error=ConfigError)
    hidden, layers = _count(keys, "hidden_size", origin), _count(keys, "num_hidden_layers", origin)
    heads = _count(keys, "num_attention_heads", origin)
    kv_heads = _count(keys, "num_key_value_heads", origin, heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{origin}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    head_size = _count(keys, "head_dim", origin, hidden // heads)
    wide = _count(keys, "intermediate_size", origin)
    experts = _first(keys, origin, "num_experts", "num_local_experts", "n_routed_experts")
    per_token = _first(keys, origin, "num_experts_per_tok", "num_experts_per_token") if experts else 0
    expert_wide = _count(keys, "moe_intermediate_size", origin, wide) if experts else 0
    if experts and not 1 <= per_token <= experts:
        raise ConfigError(
            f"{origin}: num_experts_per_tok expects a count from 1 to {experts}, got {per_token}"
        )
    shared = (
        _first(keys, origin, "shared_expert_intermediate_size")
        or _first(keys, origin, "n_shared_experts") * expert_wide
    )
    dense_layers = layers
    if experts:
        dense_layers = _first(keys, origin, "first_k_dense_replace") + len(keys.get("mlp_only_layers") or ())
    expert_layers = layers - dense_layers
    # gate, up and down
    dense = 3 * hidden * (dense_layers * wide + expert_layers * shared) + expert_layers * experts * hidden
    return ModelDimensions(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=_count(keys, "vocab_size", origin),
        attention=hidden * head_size * (2 * heads + 2 * kv_heads),
        dense=dense,
        expert=3 * hidden * expert_wide,
        experts=experts,
        experts_per_token=per_token,
        expert_layers=expert_layers,
        # Gemma's classes tie where their files do not say
        tied=bool(keys.get("tie_word_embeddings", str(keys.get("model_type", "")).startswith("gemma"))),
    )


def read_dimensions(path: Path) -> ModelDimensions:
    """Read a config.json, or the one in a folder. Raises ConfigError: missing, no JSON, or as `dimensions_of`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        keys = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot read {file}: {said}; expected a Hugging Face config.json, or a folder that holds one"
        ) from None
    if not isinstance(keys, dict):
        raise ConfigError(
            f"{file} holds {type(keys).__name__}; expected the keys of a Hugging Face config.json"
        )
    return dimensions_of(keys, origin=str(file))


def head_dimensions(target: ModelDimensions, *, layers: int, vocabulary: int) -> ModelDimensions:
    """Return a draft head in EAGLE-3's form: layers of the target's width whose attention reads twice the width.

    The projection of three hidden states into one counts to its attention.
    """
    wide = 2 * target.hidden * target.head_size * (target.heads + 2 * target.kv_heads)
    out = target.hidden * target.heads * target.head_size
    # a head is dense; its feed-forward part is as wide as the target's active one
    active = target.dense + target.expert_layers * target.experts_per_token * target.expert
    return ModelDimensions(
        layers=layers,
        hidden=target.hidden,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_size=target.head_size,
        vocabulary=vocabulary,
        attention=wide + out + 3 * target.hidden**2 // layers,
        dense=layers * (active // target.layers),
        tied=True,
    )


def _count(keys: Mapping[str, Any], key: str, origin: str, default: int | None = None) -> int:
    value = keys.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ConfigError(
            f"{origin}: {key} expects a count from 1 to {MOST:,}, got {value!r}; give a decoder's config.json"
        )
    return value


def _first(keys: Mapping[str, Any], origin: str, *names: str) -> int:
    """The first of these keys that is there; 0 without any."""
    for name in names:
        value = keys.get(name)
        if value:
            return _count(keys, name, origin)
    return 0
