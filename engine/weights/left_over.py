"""Weights that a checkpoint holds and the model of its config does not take, or not as what they are.

Transformers leaves them out with a warning, which is right for what stands beside a model (a value head, a vision
tower, a layer that predicts further tokens), and wrong for a bias, a norm or a layer of the model itself: then what is
loaded computes something else than what was trained.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ...core.errors import ModelError

FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
"As safetensors and torch call the types that hold weights themselves."
_FURTHER_TOKENS = re.compile(r"(^|[._])(mtp|nextn|eh_proj|enorm|hnorm|shared_head)")
"In names of a layer for multi-token prediction, which checkpoints number as one more layer."
_COMPUTED = re.compile(r"((attn|attention)\.(bias|masked_bias|causal_mask)|inv_freq)$")
"Masks and rotations that older versions saved beside the weights."
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def require_taken(name: str, model: Any, unexpected: Collection[str]) -> None:
    """Raise ModelError where a checkpoint holds more of the model itself than its config describes.

    Args:
        name: path or hub name.
        model: the model of its config.
        unexpected: names in its files that belong to no weight of the model.
    """
    within = sorted(
        key for key in unexpected if not _COMPUTED.search(key) and _is_within(model, key, unexpected)
    )
    if within:
        first = ", ".join(f"'{key}'" for key in within[:3])
        raise ModelError(
            f"the weight files of '{name}' hold weights that the model of its config.json has no place for, and would "
            f"compute something else without: {len(within)}, first {first}; take config.json and weights of one model "
            "(num_hidden_layers, attention_bias and model_type say which weights there are)"
        )


def require_float_weights(name: str, types: Mapping[str, str]) -> None:
    """Raise ModelError for weights in a type that needs a scale, of a config that says nothing of quantization.

    `types` are the types of the model's weights by name.
    """
    odd = sorted(key for key, held in types.items() if held.removeprefix("torch.") not in FLOATS)
    if odd:
        raise ModelError(
            f"the weight files of '{name}' hold '{odd[0]}' as {types[odd[0]]} ({len(odd)} such), and its config.json "
            "has no quantization_config that says how it becomes a number; expected float32, bfloat16 or float16: take "
            "the checkpoint that it was made from, or save it dequantized"
        )


def require_writer(name: str, config: Any) -> None:
    """Raise ModelError where a causal LM is wanted and config.json says that the checkpoint classifies.

    With tied embeddings nothing lacks in its files, so that it would write noise.
    """
    said = list(getattr(config, "architectures", None) or [])
    if said and all(one.endswith(_CLASSIFIERS) for one in said):
        raise ModelError(
            f"the model '{name}' is a {said[0]} (architectures of its config.json), which scores texts and writes "
            "none; expected a causal language model: reward models and classifiers belong to reward.model"
        )


def _is_within(model: Any, key: str, unexpected: Collection[str]) -> bool:
    base = getattr(model, "base_model_prefix", "")
    return any(_is_part(model, one, unexpected) for one in (key, f"{base}.{key}"))


def _is_part(model: Any, key: str, unexpected: Collection[str]) -> bool:
    """Whether `key` names a part of a layer, or of another module with weights, that `model` has; or one more layer."""
    parts, module, depth = key.split("."), model, 0
    while depth < len(parts) - 1 and parts[depth] in module._modules:
        module, depth = module._modules[parts[depth]], depth + 1
    if depth == 0:
        return False
    if any(part.isdigit() for part in parts[:depth]) or (depth == len(parts) - 1 and not module._modules):
        return True
    if not parts[depth].isdigit() or not all(name.isdigit() for name in module._modules):
        return False
    layer = re.compile(rf"(^|\.){re.escape('.'.join(parts[max(depth - 1, 0) : depth + 1]))}\.")
    return not any(_FURTHER_TOKENS.search(one) for one in unexpected if layer.search(one))


_GIVEN_BACK = ("fp8",)
"Methods that transformers dequantizes while it loads."


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the section `quantization_config` of a model's config.json, None where the weights are plain."""
    for section in (config, config.get_text_config()):
        found = getattr(section, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else dict(getattr(found, "__dict__", {}))
    return None


def plain_weight_settings(name: str, config: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` that make a causal LM's weights plain ones. Raises ModelError: none can."""
    found = quantization_of(config)
    if found is None:
        return {}
    if _method(found) not in _GIVEN_BACK:
        raise ModelError(
            f"the weights of the model '{name}' are quantized (quantization_config of its config.json: "
            f"{_method(found)}), and such weights cannot be trained or published; expected float32, bfloat16 or "
            "float16 ones: take the checkpoint that it was made from, or save it dequantized"
        )
    from transformers import FineGrainedFP8Config

    return {"quantization_config": FineGrainedFP8Config(dequantize=True)}


def _method(found: dict[str, Any]) -> str:
    for width in ("load_in_4bit", "load_in_8bit"):
        if found.get(width):
            return f"bitsandbytes, {width}"
    return str(getattr(found.get("quant_method"), "value", found.get("quant_method", "of no name")))
