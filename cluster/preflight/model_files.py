"""What is known of a model by its files alone: parameters, values, chat templates that lie beside one another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig

from rlhfspec.core.outside import is_file
from rlhfspec.core.settings.run import ModelsConfig
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.chunks import not_finite
from rlhfspec.engine.weights.left_over import require_writer
from rlhfspec.engine.weights.loading import load_hf_config, meta_model, refuse_not_finite
from rlhfspec.engine.weights.quantized import quantization_of, require_plain_weights
from rlhfspec.engine.weights.weight_files import check_weight_files, local_folder, weight_files

TEMPLATE_FILE = "chat_template.jinja"
"Read before all others."
_IN_JSON = ("tokenizer_config.json", "chat_template.json")


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


def require_finite_weights(models: ModelsConfig, *, has_draft_model: bool) -> None:
    """Read the weights of target and draft model, a tensor at a time, in the type that they are published in.

    A run finds what is not finite when it reads them itself.

    Raises ModelError: one is NaN or infinite, in the words of a run that begins with it.
    """
    for name in dict.fromkeys((models.target, models.draft if has_draft_model else None)):
        folder = local_folder(name) if name is not None else None
        if name is None or folder is None:
            continue
        if quantization_of(load_hf_config(name, trust_remote_code=models.trust_remote_code)) is None:
            dtype = DTYPES[models.dtype]
            tensors = (pair for file in weight_files(folder) for pair in _tensors(file))
            odd = [key for key, tensor in tensors if not_finite([(key, _as_published(tensor, dtype))])]
            refuse_not_finite(name, odd)


def other_templates(folder: Path) -> list[str]:
    """JSON files of a folder whose chat template is not that of `TEMPLATE_FILE`, which is read in its stead.

    None where there is no such file, or no folder; what cannot be read holds no template.
    """
    if not is_file(folder / TEMPLATE_FILE):
        return []
    try:
        read = (folder / TEMPLATE_FILE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    held = {name: _template_of(folder / name) for name in _IN_JSON}
    return [name for name, text in held.items() if text is not None and text.strip() != read]


def _template_of(file: Path) -> str | None:
    try:
        text = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None


def _as_published(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118, it is no mapping
                yield key, opened.get_tensor(key)
    else:
        whole = torch.load(file, map_location="cpu", weights_only=True)
        yield from ((key, value) for key, value in whole.items() if isinstance(value, Tensor))
