"""Keys of a draft head's `config.json` that its makers and readers understand differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def tap_keys(taps: Sequence[int]) -> dict[str, Any]:
    """Name the layers whose inputs are tapped, to every reader.

    vLLM reads the key at the top, of layers' inputs; SpecForge and SGLang the one in `eagle_config`, of their outputs.
    The embedding, the first layer's input, is -1 there: SGLang adds one, so it takes the right input or fails.
    """
    return {
        LAYER_IDS: list(taps),
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: [tap - 1 for tap in taps]},
    }


def taps_of(tree: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layers whose inputs are tapped; None where the config does not say. See `tap_keys`."""
    if inputs := tree.get(LAYER_IDS):
        return tuple(int(layer) for layer in inputs)
    outputs = (tree.get("eagle_config") or {}).get(LAYER_IDS)
    return tuple(int(layer) + 1 for layer in outputs) if outputs else None
