"""The weights of another library's trainer, whole: gathered where they are sharded, adapters merged.

DeepSpeed's ZeRO-3 and FSDP of both kinds, as TRL's own synchronisation with vLLM gathers them. Adapters of PEFT are
merged beside the weights (`learning.training.adapter`): merging and unmerging in place, as TRL does, lets them drift.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..core.errors import ConfigError
from ..core.surfaces.surface import note_once, surface
from ..engine.weights.chunks import unique_tensors
from ..learning.training.adapter_merge import idle_targets, merged_tensors

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"Parts of names that stand for what a module was wrapped in."


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    """Every weight under the name that the model has without wrappers; views where nothing was gathered or merged.

    Every rank must call it: gathering is collective. Raises ConfigError for adapters that cannot be merged so.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    is_adapted = hasattr(model, "peft_config")
    if is_adapted:
        _require_lora(model)
    base = model.get_base_model() if is_adapted else model
    with _gathered(model) as is_temporary:
        second = _second_names(base)
        tensors = ((name, _whole(tensor)) for name, tensor in unique_tensors(base) if name not in second)
        if is_adapted:
            tensors = merged_tensors(base, tensors, adapter=_active(model))
        return {_plain(name): tensor.clone() if is_temporary else tensor for name, tensor in tensors}


@contextmanager
def _gathered(model: nn.Module) -> Iterator[bool]:
    """Parameters of ZeRO-3 and of the first FSDP are whole in the block, on every rank; whether they are no longer."""
    split = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if split:
        with importlib.import_module("deepspeed").zero.GatheredParameters(split):
            yield True
    elif any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield True
    else:
        yield False


def _second_names(base: nn.Module) -> set[str]:
    """Further names of weights that are tied, where the first FSDP's `state_dict` makes a copy for each name."""
    if not any(isinstance(module, FullyShardedDataParallel) for module in base.modules()):
        return set()
    weights = sorted(base.named_parameters(remove_duplicate=False))
    first = {parameter.data_ptr(): name for name, parameter in reversed(weights) if parameter.numel()}
    return {name for name, parameter in weights if first.get(parameter.data_ptr(), name) != name}


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _active(model: Any) -> str:
    """The adapter that learns; TRL adds one called ref, which does not. Raises ConfigError where several are on."""
    names = list(model.active_adapters)
    if len(names) != 1:
        raise ConfigError(
            f"rollout_func: the model's active adapters are {', '.join(names) or 'none'}, expected one, which is "
            "merged for the engine; call model.set_adapter with one name"
        )
    return names[0]


def _require_lora(model: Any) -> None:
    """Refuse adapters that are not merged, by their settings, whose table is `core/surfaces/adapter.toml`."""
    for name, recipe in model.peft_config.items():
        given = {key: getattr(value, "value", value) for key, value in recipe.to_dict().items()}
        what = f"rollout_func: the trainer's adapter '{name}'"
        surface("adapter_config").require(given, what, error=ConfigError)
        # peft holds the names of one adapter alone
        if len(model.peft_config) == 1 and (idle := idle_targets(model, name)):
            note_once(f"{what}: names of target_modules that no module has learn nothing: {', '.join(idle)}")
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    ):
        raise ConfigError(
            "rollout_func: LoRA was given and FSDP shards the model, where adapters are not merged for the engine; use "
            "DeepSpeed or plain data parallelism, or train all weights"
        )
