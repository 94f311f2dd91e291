"""What is published of a model with adapters: of every wrapped module what peft's own `merge` makes, on copies.

Every tensor of the adapted model is accounted for: it is merged, passes as it is, is replaced by one that learns whole,
or is refused by name (`core/surfaces/adapter.toml`). None is left out in silence.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.surfaces.surface import surface

_INSIDE = re.compile(r"\.(?:base_layer|token_adapter|original_module)(?=\.|$)")
"Parts of names that stand for what is inside a wrapper."
_KINDS = {"Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ParamWrapper", "TrainableTokensLayer"}
"Layers of peft on plain weights, which it merges into tensors of the same names."
Owner = tuple[str, str]
"A module's name without wrappers, and its tensor's."


def merged_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, adapter: str = "default"
) -> Iterator[tuple[str, Tensor]]:
    """The weights of an adapted model under the names it had without adapters, one merged at a time.

    `tensors` are the adapted model's, in name order, a layer's adapters whole while its weights are given. Merged ones
    are float32 whatever the weights below are held in. Of several adapters one is merged.
    Raises ConfigError naming what learns and would not be in the result.
    """
    wrapped = Wrapped(model, adapter)
    due = dict(wrapped.due)
    for name, tensor in tensors:
        plain = wrapped.plain_name(name)
        if plain is None:
            continue
        first, *others = due.pop(name, (None,))
        if first is not None:
            merged = wrapped.merged(first, tensor)
            for other in others:
                if not torch.allclose(merged, wrapped.merged(other, tensor), rtol=1e-4, atol=1e-6):
                    raise _parted(".".join(first), ".".join(other))
            tensor = merged
        yield plain, tensor
    if due:
        raise ConfigError(
            f"the adapter changes {min(due)}, which is not among the tensors to be published; expected each of them "
            "merged: a checkpoint would not be what was learned"
        )


def idle_targets(adapted: Any, adapter: str) -> list[str]:
    """Names listed in an adapter's `target_modules` that no module of peft's model `adapted` has: peft skips them."""
    wanted, names = adapted.peft_config[adapter].target_modules, adapted.base_model.targeted_module_names
    listed = () if isinstance(wanted, str) else sorted(wanted or ())
    return [one for one in listed if not any(f".{name}".endswith(f".{one}") for name in names)]


class Wrapped:
    """The modules of a model that peft has wrapped, as one adapter leaves them."""

    def __init__(self, model: nn.Module, adapter: str) -> None:
        """Look through a model. Raises ConfigError for what cannot be merged, and what learns and would be lost."""
        self._adapter = adapter
        self._layers: dict[str, list[Any]] = {}
        "what adapts a module, outermost first, by the module's name"
        self._hidden: dict[str, Tensor | None] = {}
        "tensors that are not given on: of adapters; and those that another replaces, with it"
        self._whole: dict[str, str] = {}
        "tensors that learn whole: the names that they had"
        kept = importlib.import_module("peft.utils.other").ModulesToSaveWrapper
        tuned = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
        for path, module in model.named_modules():
            if isinstance(module, kept):
                self._take_whole(path, module)
            elif isinstance(module, tuned):
                self._take_layer(path, module)
        self._require_none_lost(model)
        self.due = self._due(model)
        "what is merged, by its name in the adapted model: all that this one tensor is"

    def plain_name(self, name: str) -> str | None:
        """What a tensor was called before it was wrapped; None: it is an adapter's, or replaced."""
        return None if name in self._hidden else self._whole.get(name) or _INSIDE.sub("", name)

    def base_name(self, name: str) -> str | None:
        """What a tensor is called that the model has without the adapter; None: it is an adapter's."""
        if name in self._whole or (name in self._hidden and self._hidden[name] is None):
            return None
        return _INSIDE.sub("", name)

    def frozen(self) -> list[str]:
        """Modules whose adapter has a part that does not learn."""
        return [
            path
            for path, layers in self._layers.items()
            if not all(part.requires_grad for one in layers for part in _parts(one, self._adapter))
        ]

    def merged(self, owner: Owner, tensor: Tensor) -> Tensor:
        """What all adapters of a module make of a tensor of it, in float32 and in a tensor of its own."""
        path, kind = owner
        if kind == "weight":
            tensor = _whole_weight(self._layers[path][-1].get_base_layer(), tensor)
        before = tensor
        for layer in reversed(self._layers[path]):
            if kind in _changed(layer, self._adapter):
                tensor = _merged(layer, kind, tensor, self._adapter)
        # -0.0 + 0.0 is 0.0: a weight that did not move keeps its bits, which the checksum covers
        return torch.where(tensor == before, before.float(), tensor)

    def _take_whole(self, path: str, module: Any) -> None:
        own = module.modules_to_save
        new = dict(own[self._adapter].state_dict(keep_vars=True)) if self._adapter in own else {}
        self._hidden |= {f"{path}.{name}": None for name in module.state_dict() if "modules_to_save." in name}
        for name, tensor in new.items():
            whole = f"{path}.modules_to_save.{self._adapter}.{name}"
            del self._hidden[whole]
            self._whole[whole] = _INSIDE.sub("", f"{path}.{name}")
            self._hidden[f"{path}.original_module.{name}"] = tensor

    def _take_layer(self, path: str, layer: Any) -> None:
        what = f"the adapter of {_INSIDE.sub('', path)}"
        if type(layer).__name__ not in _KINDS:
            raise ConfigError(
                f"{what} is peft's {type(layer).__module__}.{type(layer).__name__}, which is not merged here; expected "
                f"one of {', '.join(sorted(_KINDS))} on plain weights; take the module out of target_modules"
            )
        if layer.merged_adapters:
            raise ConfigError(f"{what} is merged into its weight already; call unmerge_adapter() first")
        if "bias" in _changed(layer, self._adapter) and getattr(layer.get_base_layer(), "bias", None) is None:
            raise ConfigError(
                f"{what} has a bias (lora_bias) and its weight has none to merge it into; leave lora_bias off"
            )
        own = [name for name in layer.state_dict() if not name.startswith("base_layer.")]
        surface("adapter_tensors").require({name.split(".")[0]: 1 for name in own}, what, error=ConfigError)
        scales = ["base_layer.absmax"] if hasattr(layer.get_base_layer(), "quant_state") else []
        self._hidden |= {f"{path}.{name}": None for name in [*own, *scales]}
        if next(iter(_parts(layer, self._adapter)), None) is not None:
            self._layers.setdefault(_INSIDE.sub("", path), []).append(layer)

    def _require_none_lost(self, model: nn.Module) -> None:
        layers = [layer for wrappers in self._layers.values() for layer in wrappers]
        used = {id(part) for layer in layers for part in _parts(layer, self._adapter)}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name in self._hidden and id(parameter) not in used:
                raise ConfigError(
                    f"{name} learns and is no part of the adapter that is merged, '{self._adapter}': what it learned "
                    "would be lost; call set_adapter with that one name, or freeze it"
                )

    def _due(self, model: nn.Module) -> dict[str, list[Owner]]:
        due: dict[int, list[Owner]] = {}
        first: dict[int, str] = {}
        becomes: dict[int, dict[str, Any]] = {}
        for path, module in model.named_modules():
            owner = _INSIDE.sub("", path)
            for kind, parameter in module._parameters.items():
                name, key = f"{path}.{kind}".lstrip("."), id(parameter)
                new = self._hidden.get(name)
                if parameter is None or (name in self._hidden and new is None):
                    continue
                is_merged = any(kind in _changed(one, self._adapter) for one in self._layers.get(owner, ()))
                # a weight of several modules is given under the first of its names
                first[key] = min(first.get(key, name), name)
                becomes.setdefault(key, {})[f"{owner}.{kind}"] = (
                    "merged" if is_merged else None if new is None else id(new)
                )
                if is_merged:
                    due.setdefault(key, []).append((owner, kind))
        for owners in becomes.values():
            if len(set(owners.values())) > 1:
                one, *_ = (name for name, what in owners.items() if what is not None)
                raise _parted(one, next(name for name, what in owners.items() if what != owners[one]))
        return {first[key]: owners for key, owners in due.items()}


def _parts(layer: Any, adapter: str) -> Iterator[nn.Parameter]:
    """The parameters of one adapter in a layer."""
    for kind in layer.adapter_layer_names:
        held = getattr(layer, kind, None)
        if held is not None and adapter in held:
            part = held[adapter]
            yield from (part,) if isinstance(part, nn.Parameter) else part.parameters()


def _changed(layer: Any, adapter: str) -> tuple[str, ...]:
    """Which tensors of the module inside it a layer's `merge` changes."""
    if hasattr(layer, "parameter_name"):
        return (layer.parameter_name,)
    return ("weight", "bias") if getattr(layer, "lora_bias", {}).get(adapter) else ("weight",)


def _whole_weight(module: nn.Module, packed: Tensor) -> Tensor:
    """The weight that a module computes with, float [out, in]; `packed` is how it is held."""
    state = getattr(module, "quant_state", None)
    if state is None:
        return packed
    return importlib.import_module("bitsandbytes").functional.dequantize_4bit(packed, state)


def _merged(layer: Any, kind: str, tensor: Tensor, adapter: str) -> Tensor:
    """What peft makes of a tensor, on a copy of layer and module: neither is touched."""
    module = copy.copy(layer.get_base_layer())
    held = {one: module._parameters.get(one) for one in _changed(layer, adapter)} | {kind: tensor}
    module._parameters = dict(module._parameters) | {
        name: nn.Parameter(one.detach().float().clone(), requires_grad=False)
        for name, one in held.items()
        if one is not None
    }
    alone = copy.copy(layer)
    alone.merged_adapters, alone._caches = [], {}
    alone._modules = dict(layer._modules) | {"base_layer": module}
    with torch.no_grad():
        alone.merge(adapter_names=[adapter])
    return getattr(module, kind).detach()


def _parted(one: str, other: str) -> ConfigError:
    return ConfigError(
        f"the adapter changes {one}, whose weight is also that of {other} (tie_word_embeddings): merged, the two would "
        "differ, and the model has one weight for both; take it out of the targets and of modules_to_save"
    )
