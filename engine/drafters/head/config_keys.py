"""Keys of a draft head's `config.json`: those that its makers and readers understand differently, and those refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....core.errors import ModelError

NUM_MIXED = 3
"Hidden states that `fc` mixes."
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


ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"Kinds of rotary positions whose frequencies are the same at every length, and what stands beside them."


def rope_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters under their present names: older configs say `type`. The default kind is left out."""
    rest = {key: value for key, value in parameters.items() if key not in ("rope_type", "type", "rope_theta")}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = {"rope_theta": float(parameters.get("rope_theta") or 10_000.0)}
    return theta if kind == "default" else theta | {"rope_type": kind} | rest


def rope_of_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's rotary parameters, whichever of its keys they stand in."""
    return rope_of(_rope_keys(tree))


def require_plain(tree: Mapping[str, Any], name: str) -> None:
    """Raise ModelError where a config asks for arithmetic that is not plain EAGLE-3's: our drafts would be others."""
    wrong = next((each for each in _facts(tree) if each[1] != each[2]), None)
    why = _wrong_taps(tree) or wrong_rope(tree) or _wrong_number(tree)
    if wrong is not None:
        what, expected, got = wrong
        why = f"{what}: expected {expected!r}, got {got!r}"
    if why:
        raise ModelError(
            f"the draft head {name} computes otherwise than EAGLE-3 as it is read here: {why}; take a head of the "
            "plain form, or make one with `rlhfspec drafter make`"
        )


def _facts(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What is computed one way only: key, expected, got."""
    for key in (
        "norm_output",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "attention_bias",
        "mlp_bias",
    ):
        yield key, False, bool(tree.get(key))
    yield "hidden_act", "silu", tree.get("hidden_act") or "silu"
    yield "num_hidden_layers", 1, _or(tree.get("num_hidden_layers"), 1)
    yield (
        "target_hidden_size",
        tree.get("hidden_size"),
        _or(tree.get("target_hidden_size"), tree.get("hidden_size")),
    )
    eagle = tree.get("eagle_config") or {}
    yield "use_aux_hidden_state", True, bool(_or(eagle.get("use_aux_hidden_state"), True))
    for keys in (tree, _rope_keys(tree)):
        yield "partial_rotary_factor", 1, _or(keys.get("partial_rotary_factor"), 1)


def _wrong_taps(tree: Mapping[str, Any]) -> str:
    taps = taps_of(tree)
    if taps is None or (len(taps) == NUM_MIXED and list(taps) == sorted(taps) and taps[0] >= 0):
        return ""
    return f"{LAYER_IDS}: expected {NUM_MIXED} layers' inputs from 0, ascending, got {list(taps)}"


def wrong_rope(tree: Mapping[str, Any]) -> str:
    """Say what is unknown of a config's rotary positions; empty: nothing."""
    rope = rope_of_tree(tree)
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_NEEDS:
        *most, last = ROPE_NEEDS
        return f"rope_type: expected {', '.join(most)} or {last}, got {kind!r}"
    lacking = [key for key in ROPE_NEEDS[kind] if rope.get(key) is None]
    return f"rope_type {kind}: expected {', '.join(lacking)} beside it" if lacking else ""


def _wrong_number(tree: Mapping[str, Any]) -> str:
    """Numbers that are taken as they are, and with which nothing, or NaN, would be computed."""
    eps, theta = _or(tree.get("rms_norm_eps"), 1e-6), _or(rope_of_tree(tree).get("rope_theta"), 1e4)
    for key, value in (("rms_norm_eps", eps), ("rope_theta", theta)):
        if not 0.0 < float(value) < math.inf:
            return f"{key}: expected a number above 0, got {value!r}"
    size = tree.get("head_dim") or int(tree["hidden_size"]) // max(int(tree["num_attention_heads"]), 1)
    if int(size) < 2 or int(size) % 2:
        return f"head_dim: expected an even number above 0, got {size!r}"
    return ""


def _rope_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    theta = {"rope_theta": tree.get("rope_theta")}
    return theta | (tree.get("rope_parameters") or {}) | (tree.get("rope_scaling") or {})


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
