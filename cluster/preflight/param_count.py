"""Parameters of a model that is not loaded, its weight files checked on the way."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig

from engine.weights.left_over import require_writer
from engine.weights.loading import meta_model
from engine.weights.quantized import require_plain_weights
from engine.weights.weight_files import check_weight_files


def count_params(config: PretrainedConfig, auto_class: Any, name: str | None = None) -> int:
    """Parameters of a model, counted on the meta device.

    Args:
        config: of the model.
        auto_class: as `AutoModelForCausalLM`.
        name: path or hub name; where given, its weight files are checked too.

    Raises:
        ModelError: there is no such model, its weight files are not whole or another model's, or a causal LM's are
            quantized or a classifier's.
    """
    model = meta_model(name or config.model_type, config, auto_class)
    if name is not None:
        if auto_class is AutoModelForCausalLM:
            require_writer(name, config)
            require_plain_weights(name, config)
        check_weight_files(name, model)
    return sum(parameter.numel() for parameter in model.parameters())
