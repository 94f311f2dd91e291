"""What is known of a model by its files alone: parameters, values, chat templates that lie beside one another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.errors import ModelError
from ...core.outside import is_file, quote
from ...engine.cache.kv_pool import KVShape
from ...engine.weights.causal_lm import DTYPES
from ...engine.weights.chunks import not_finite
from ...engine.weights.left_over import plain_weight_settings, quantization_of, require_writer
from ...engine.weights.llama_config import EMBEDDING, HEAD, MODEL_TYPES
from ...engine.weights.loading import meta_model, num_token_ids, refuse_not_finite
from ...engine.weights.stored_weights import StoredWeights, stored_weights
from ...engine.weights.weight_files import check_weight_files, local_folder, weight_files
from .model_sizes import ModelShape

TEMPLATE_FILE = "chat_template.jinja"
"Read before all others."
_IN_JSON = ("tokenizer_config.json", "chat_template.json")


def count_params(config: PretrainedConfig, auto_class: Any, name: str) -> int:
    """Parameters of a model.

    Args:
        config: of the model.
        auto_class: as `AutoModelForCausalLM`.
        name: path or hub name, whose weight files are checked too.

    Raises:
        ModelError: there is no such model, its weight files are not whole or another model's, or a causal LM's are
            quantized or a classifier's.
    """
    if auto_class is AutoModelForCausalLM and (stored := own_weights(name, config)) is not None:
        return stored.num_parameters()
    return sum(parameter.numel() for parameter in _described(config, auto_class, name).parameters())


def own_weights(name: str, config: PretrainedConfig) -> StoredWeights | None:
    """The weights of a folder that holds them and nothing else; None where transformers, which takes seconds, must say.

    Raises ModelError: a file is not whole.
    """
    stored = stored_weights(name, config, "float32")
    return stored if stored is not None and len(stored.found) == len(stored.shapes) else None


def _described(config: PretrainedConfig, auto_class: Any, name: str | None) -> Any:
    """The model on the meta device; see `count_params`."""
    model = meta_model(name or config.model_type, config, auto_class)
    if name is not None:
        if auto_class is AutoModelForCausalLM:
            require_writer(name, config)
            plain_weight_settings(name, config)
        check_weight_files(name, model)
    return model


_BEHIND_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"Settings of families that do something to their logits."


def model_shape(config: PretrainedConfig, name: str | None = None) -> ModelShape:
    """Sizes of the causal LM a Hugging Face config describes.

    Args:
        config: of the model.
        name: path or hub name; where given, its weight files are checked too.

    Raises:
        ModelError: there is no such model, or its weight files are not whole or another model's.
    """
    text, stored = config.get_text_config(), None if name is None else own_weights(name, config)
    if stored is not None:
        shapes, tables = stored.shapes, {HEAD, EMBEDDING} & stored.shapes.keys()
    else:
        model = _described(config, AutoModelForCausalLM, name)
        ends = {
            id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end
        }
        shapes = {path: tuple(one.shape) for path, one in model.named_parameters()}
        tables = {path for path, one in model.named_parameters() if id(one) in ends}
    experts = getattr(text, "num_experts_per_tok", None) or 0
    width = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    products = [prod(shape) for path, shape in shapes.items() if len(shape) > 1 and path not in tables]
    return ModelShape(
        num_params=sum(map(prod, shapes.values())),
        num_product_params=sum(products),
        largest_product=max(products, default=0),
        has_two_tables=len(tables) == 2,
        mlp_size=experts * (getattr(text, "moe_intermediate_size", None) or width) if experts else width,
        norms_heads=any(path.rpartition(".")[0].endswith("q_norm") for path in shapes),
        kv=KVShape.of(config),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        has_whole_logits=any(getattr(text, name, None) not in (None, 1.0) for name in _BEHIND_THE_HEAD),
        is_ours=text.model_type in MODEL_TYPES,
    )


def check_vocabulary(role: str, name: str, shape: ModelShape, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError where the tokenizer has tokens that the model has no row for."""
    needed = num_token_ids(tokenizer)
    if shape.vocab_size < needed:
        over = tokenizer.convert_ids_to_tokens(list(range(shape.vocab_size, needed)))
        named = ", ".join(quote(token) for token in over[:3])
        raise ModelError(
            f"the {role} model {name} has {shape.vocab_size} token ids, the tokenizer {needed} (beyond: {named}): "
            "every token needs a row of the model; take a model trained with this tokenizer, or set models.tokenizer"
        )


def describe_model(role: str, name: str, shape: ModelShape) -> str:
    """A model's line of the plan."""
    return f"{role} {name}: {shape.num_params / 1e6:.2f}M parameters, {shape.kv.num_layers} layers"


def require_finite_weights(configs: Mapping[str, PretrainedConfig], dtype: str) -> None:
    """Read the weights of models, by path or hub name, a tensor at a time, in the type that they are published in.

    A run finds what is not finite when it reads them itself.

    Raises ModelError: one is NaN or infinite, in the words of a run that begins with it.
    """
    for name, config in configs.items():
        folder = local_folder(name)
        if folder is not None and quantization_of(config) is None:
            tensors = (pair for file in weight_files(folder) for pair in _tensors(file))
            odd = [k for k, tensor in tensors if not_finite([(k, _as_published(tensor, DTYPES[dtype]))])]
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
