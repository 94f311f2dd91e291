"""Checkpoints whose weights are quantized: which of them become plain weights when they are loaded, and which cannot.

Learning steps float32 weights, and instances decode from what it publishes. Where transformers gives the weights
themselves back (fp8) the model is taken so, on any device; other methods are refused by name.
"""

from __future__ import annotations

from typing import Any

from rlhfspec.core.errors import ModelError

_GIVEN_BACK = ("fp8",)
"Methods that transformers dequantizes while it loads."


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the section `quantization_config` of a model's config.json, None where the weights are plain."""
    for section in (config, config.get_text_config()):
        found = getattr(section, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else dict(getattr(found, "__dict__", {}))
    return None


def require_plain_weights(name: str, config: Any) -> None:
    """Raise ModelError for a causal LM whose weights stay quantized when it is loaded."""
    found = quantization_of(config)
    if found is None or _method(found) in _GIVEN_BACK:
        return
    raise ModelError(
        f"the weights of the model '{name}' are quantized (quantization_config of its config.json: {_method(found)}), "
        "and such weights cannot be trained or published; expected float32, bfloat16 or float16 ones: take the "
        "checkpoint that it was made from, or save it dequantized"
    )


def loading_settings(config: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` that make a quantized checkpoint's weights plain ones."""
    found = quantization_of(config)
    if found is None or _method(found) not in _GIVEN_BACK:
        return {}
    from transformers import FineGrainedFP8Config

    return {"quantization_config": FineGrainedFP8Config(dequantize=True)}


def _method(found: dict[str, Any]) -> str:
    for width in ("load_in_4bit", "load_in_8bit"):
        if found.get(width):
            return f"bitsandbytes, {width}"
    return str(getattr(found.get("quant_method"), "value", found.get("quant_method", "of no name")))
