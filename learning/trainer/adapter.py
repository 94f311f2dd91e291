"""LoRA: low-rank adapters learn, the weights below them stay. By `peft`, an optional dependency.

The reference policy is the model with its adapters switched off, so no second model is held. What is published is
merged for each publication, W + scaling B A in float32, beside the weights and not in them: merging and unmerging
in place would let them drift. Dropout is 0, or the ratio of a first minibatch would not be 1.

Source: Hu et al. 2022, 'LoRA: Low-rank adaptation of large language models', section 4.1.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.trainer import LoraConfig

_NAME = "default"
"What peft calls an adapter that was given no name."
_BASE, _OWN = ".base_layer.", ".lora_"
"Parts of names in an adapted model: of the frozen weight, of the adapter's own."
_PREFIX = "base_model.model."
"Before the names of all tensors in a peft model."
_KEPT, _BEFORE = ".modules_to_save.", ".original_module."
_WHOLE = f"{_KEPT}{_NAME}."
"Parts of names: of a head that learns whole, and of what it was before."


class Adapter:
    """The adapters of one model, which is changed in place: its targeted linears get adapters beside them."""

    def __init__(
        self, model: PreTrainedModel, settings: LoraConfig, *, seed: int, head: str | None = None
    ) -> None:
        """Freeze the model and put adapters into it; they start at zero, so the policy is the model's own.

        `head` names a module that learns whole: that of a reward model, which is new.
        Raises ConfigError: peft is not installed, no module has a name that is targeted, or a targeted weight is
        shared with another module, which merging would part.
        """
        peft = require_peft()
        targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
        recipe = peft.LoraConfig(
            task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
            modules_to_save=None if head is None else [head],
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=targets,
        )
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            try:
                self._adapted = peft.get_peft_model(model, recipe)
            except ValueError as error:
                raise ConfigError(
                    f"trainer.lora.targets cannot be used with this model: {' '.join(str(error).split())[:200]}; name "
                    "linear layers of it, such as q_proj, or take all-linear"
                ) from error
        self._model = model
        self._require_untied()

    def switched_off(self) -> AbstractContextManager[Any]:
        """The model without its adapters: the reference policy."""
        return self._adapted.disable_adapter()

    def num_params(self) -> int:
        """Parameters that learn."""
        return sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)

    def merged_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """See `merged_tensors` below."""
        return merged_tensors(self._model, tensors)

    def base_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights without adapters, named as `merged_tensors` names them: the reference policy's.

        `tensors` are the adapted model's, as for `merged_tensors`.
        """
        for name, tensor in tensors:
            if _OWN not in name and _WHOLE not in name:
                yield name.replace(_BASE, ".").replace(_BEFORE, "."), tensor

    def files(self, tensors: Iterable[tuple[str, Tensor]], *, base_model: str) -> dict[str, bytes]:
        """The adapter as `peft.PeftModel.from_pretrained` loads it onto `base_model`: name and content of each file.

        `tensors` are the adapted model's, as for `merged_tensors`.
        """
        own = {
            f"{_PREFIX}{name}": tensor.clone() for name, tensor in tensors if _OWN in name or _WHOLE in name
        }
        self._adapted.peft_config[_NAME].base_model_name_or_path = base_model
        with tempfile.TemporaryDirectory(prefix="rlhfspec-adapter-") as folder:
            # peft would ask the hub whether the vocabulary has grown; it never does here
            self._adapted.save_pretrained(folder, save_embedding_layers=False, state_dict=own)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def _require_untied(self) -> None:
        owners: dict[int, list[str]] = {}
        for name, module in self._model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and not isinstance(module, _adapted_kinds()):
                owners.setdefault(id(weight), []).append(name)
        for names in owners.values():
            adapted = [name.removesuffix(_BASE[:-1]) for name in names if name.endswith(_BASE[:-1])]
            if adapted and len(names) > 1:
                other = next(name for name in names if name.removesuffix(_BASE[:-1]) != adapted[0])
                raise ConfigError(
                    f"trainer.lora.targets names {adapted[0]}, whose weight is also that of {other}: merged, the two "
                    "would differ, and the model has one weight for both; take it out of the targets"
                )


def count_adapter_params(model: PreTrainedModel, settings: LoraConfig) -> int:
    """Parameters that would learn in a model, which may be of shapes only (meta device). Errors as `Adapter`."""
    return Adapter(model, settings, seed=0).num_params()


def require_peft() -> Any:
    """Import peft. Raises ConfigError naming the extra when it is not installed."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"trainer.lora needs the package peft, which is not installed ({error}); "
            "pip install 'rlhfspec[lora]', or take trainer.lora out"
        ) from None


def merged_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, adapter: str = _NAME
) -> Iterator[tuple[str, Tensor]]:
    """The weights of an adapted model under the names it had without adapters, one merged at a time.

    `tensors` are the adapted model's, in name order, a layer's adapters whole while its weight is the last one
    given. Merged ones are float32 whatever the weights below are held in. Of several adapters one is merged.
    """
    layers = {
        name: module for name, module in model.named_modules() if adapter in getattr(module, "lora_A", ())
    }
    whole = f"{_KEPT}{adapter}."
    for name, tensor in tensors:
        if _OWN in name or _BEFORE in name or (_KEPT in name and whole not in name):
            continue
        name = name.replace(whole, ".")
        path, _, kind = name.partition(_BASE)
        is_merged = kind == "weight" and path in layers
        yield name.replace(_BASE, "."), _merged(layers[path], tensor, adapter) if is_merged else tensor


def _merged(layer: nn.Module, weight: Tensor, adapter: str) -> Tensor:
    """W + scaling B A of one adapted layer, in float32 and in a tensor of its own."""
    with torch.no_grad():
        delta = layer.get_delta_weight(adapter).float()  # type: ignore[operator]
        # -0.0 + 0.0 is 0.0: a weight that did not move keeps its bits, which the checksum covers
        return torch.where(delta == 0.0, weight.float(), weight.float() + delta)


def _adapted_kinds() -> tuple[type, ...]:
    """Wrappers, which show the weight of the layer inside them as their own."""
    layers = importlib.import_module("peft.tuners.tuners_utils")
    return (layers.BaseTunerLayer,)
