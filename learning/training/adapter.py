"""LoRA: low-rank adapters learn, the weights below them stay. By `peft`, an optional dependency.

The reference policy is the model with its adapters switched off, so no second model is held. What is published is
merged for each publication, in float32, beside the weights and not in them (`adapter_merge`): merging and
unmerging in place would let them drift. Dropout is 0, or the ratio of a first minibatch would not be 1.

Source: Hu et al. 2022, 'LoRA: Low-rank adaptation of large language models', section 4.1.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...core.errors import ConfigError
from ...core.settings.trainer import LoraConfig
from ...core.surfaces.surface import surface
from ...engine.weights.causal_lm import PreTrainedModel
from ...engine.weights.weight_files import ADAPTER_FILE
from .adapter_merge import Wrapped, idle_targets, merged_tensors
from .sharded import standing_in

_LINEARS = (nn.Linear, Conv1D)
_NAME = "default"
"What peft calls an adapter that was given no name."
_OWN = ".lora_"
"Part of names in an adapted model: of the adapter's own."
_PREFIX = "base_model.model."
"Before the names of all tensors in a peft model."
_WHOLE = f".modules_to_save.{_NAME}."
"Part of names: of a head that learns whole."


class Adapter:
    """The adapters of one model, which is changed in place: its targeted linears get adapters beside them."""

    def __init__(
        self, model: PreTrainedModel, settings: LoraConfig, *, seed: int, head: str | None = None
    ) -> None:
        """Freeze the model and put adapters into it; new ones start at zero, so the policy is the model's own.

        `head` names a module that learns whole: that of a reward model, which is new.
        Raises ConfigError: peft is not installed, no module has a name that is targeted, one cannot be merged, or
        `adapter_path` is another adapter than the settings say.
        """
        peft = require_peft()
        linears = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, _LINEARS)}
        recipe = peft.LoraConfig(
            task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
            modules_to_save=None if head is None else [head],
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            use_rslora=settings.use_rslora,
            target_modules=settings.targets if isinstance(settings.targets, str) else [*settings.targets],
        )
        devices = [model.device] if model.device.type == "cuda" else []
        # peft takes adapters to the device of what they are beside
        with torch.random.fork_rng(devices=devices), standing_in(model):
            torch.manual_seed(seed)
            try:
                self._adapted = peft.get_peft_model(model, recipe)
                _add_in_place(model)
                if idle := idle_targets(self._adapted, _NAME):
                    raise ValueError(f"no module of it is named {' or '.join(idle)}")
            except (ValueError, TypeError, NotImplementedError) as error:
                raise ConfigError(
                    f"trainer.lora.targets cannot be used with this model: {' '.join(str(error).split())[:200]}; name "
                    f"linear layers of it ({', '.join(sorted(linears))}), or take all-linear"
                ) from error
            self._model = model
            if settings.adapter_path is not None:
                self._start_from(Path(settings.adapter_path).expanduser(), peft)
        try:
            shared = [owners for owners in self._wrapped().due.values() if len(owners) > 1]
        except ConfigError as error:
            raise ConfigError(f"trainer.lora.targets cannot be used with this model: {error}") from None
        if shared:
            (one, _), (other, _), *_ = shared[0]
            raise ConfigError(
                f"trainer.lora.targets names {one} and {other}, which are one weight: merged, the two would differ; "
                "take them out of the targets"
            )

    def _start_from(self, folder: Path, peft: Any) -> None:
        """Take over an adapter's tensors; on the meta device look at its settings alone. Raises ConfigError."""
        what = f"trainer.lora.adapter_path {folder}"
        try:
            theirs = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
            tensors = peft.utils.load_peft_weights(str(folder), device="cpu")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{what} is no folder of an adapter ({error}); expected peft's files") from None
        known = surface("adapter_config")
        known.require(theirs, what, error=ConfigError)
        ours = self._adapted.peft_config[_NAME].to_dict()
        # targets have many spellings: the tensors tell them
        for key in sorted((ours.keys() & known.used) - {"task_type", "target_modules"}):
            asked, found = (_plain(one.get(key)) for one in (ours, theirs))
            if asked != found:
                raise ConfigError(
                    f"{what} has {key} {found}, expected trainer.lora's {asked}; set it to that there"
                )
        expected = peft.get_peft_model_state_dict(self._adapted, save_embedding_layers=False)
        if odd := sorted(expected.keys() ^ tensors.keys()):
            raise ConfigError(
                f"{what} is of other targets or another model: {odd[0]} is in one of the two; set trainer.lora.targets "
                "to its own"
            )
        if self._model.device.type != "meta":
            peft.set_peft_model_state_dict(self._adapted, tensors)

    def switched_off(self) -> AbstractContextManager[Any]:
        """The model without its adapters: the reference policy."""
        return self._adapted.disable_adapter()

    def num_params(self) -> int:
        """Parameters that learn."""
        return sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)

    def merged_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """See `adapter_merge.merged_tensors`."""
        self._wrapped()
        return merged_tensors(self._model, tensors)

    def _wrapped(self) -> Wrapped:
        """What is adapted now. Raises ConfigError for what cannot be merged, and for an adapter that does not learn."""
        wrapped = Wrapped(self._model, _NAME)
        if frozen := wrapped.frozen():
            raise ConfigError(
                f"the adapter of {frozen[0]} and of {len(frozen) - 1} more modules is frozen, expected all to learn; "
                "leave requires_grad as trainer.lora sets it, or take them out of trainer.lora.targets"
            )
        return wrapped

    def base_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights without adapters, named as `merged_tensors` names them: the reference policy's.

        `tensors` are the adapted model's, as for `merged_tensors`.
        """
        wrapped = Wrapped(self._model, _NAME)
        return ((plain, tensor) for name, tensor in tensors if (plain := wrapped.base_name(name)) is not None)

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


def _add_in_place(model: nn.Module) -> None:
    """Let layers add an adapter's product in place: the two matrices that peft's makes leave holes in a CPU's heap."""
    linear = importlib.import_module("peft.tuners.lora.layer").Linear
    for module in model.modules():
        if type(module) is linear:
            module.forward = partial(_added_in_place, module)


def _added_in_place(layer: Any, x: Tensor) -> Tensor:
    """What peft's layer gives, rounded once less; of other types than float linears, or of more axes, its own."""
    low, up, base = layer.lora_A[_NAME], layer.lora_B[_NAME], layer.base_layer
    is_plain = type(base) in _LINEARS and base.weight.dtype == low.weight.dtype and x.ndim in (2, 3)
    if layer.disable_adapters or layer.merged or not is_plain:
        return type(layer).forward(layer, x)
    out, thin = base(x), low(x)
    matrix, scale = up.weight.t().to(thin.dtype), layer.scaling[_NAME]
    if out.ndim == 2:
        return out.addmm_(thin, matrix, alpha=scale)
    return out.baddbmm_(thin, matrix.expand(len(thin), -1, -1), alpha=scale)


def _plain(value: Any) -> Any:
    """A setting as JSON has it, in one order; what is empty is not set."""
    return (sorted(value) if isinstance(value, set | list | tuple) else value) or None


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


def quantise_below_adapters(
    model: PreTrainedModel, compute_dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """QLoRA: hold every linear weight below an adapter in 4 bits, but the output head's; then move the model.

    One weight at a time is on `device` whole (None: where the model is). NF4 by bitsandbytes, in blocks of 64 with a
    float32 scale each: 4.5 bits a weight. The scales are not quantised again, as they are not in TRL by default; they
    are a buffer, `absmax`, so that a state holds all of a weight.
    Source: Dettmers et al. 2023, 'QLoRA: Efficient finetuning of quantized LLMs', section 3.
    Raises ConfigError: bitsandbytes is not installed, or what has an adapter is no plain linear.
    """
    library = require_bitsandbytes("trainer.lora.base_bits", "take it out")
    device = device or model.device
    wrapper: Any = importlib.import_module("peft.tuners.lora.layer").LoraLayer
    adapted = {path: module for path, module in model.named_modules() if isinstance(module, wrapper)}
    for path, layer in adapted.items():
        linear: Any = layer.base_layer
        if layer is model.get_output_embeddings():
            continue
        if type(linear) is not nn.Linear:
            raise ConfigError(
                f"trainer.lora.base_bits holds linears in 4 bits, and {path} is a {type(linear).__name__}; take it out "
                "of trainer.lora.targets, or base_bits out"
            )
        layer.base_layer = _quantised(linear, compute_dtype, device, library)
    model.to(device)  # type: ignore[arg-type]


def require_bitsandbytes(key: str, instead: str) -> Any:
    """Import bitsandbytes. Raises ConfigError naming the setting that needs it, and what to do `instead`."""
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(
            f"{key} needs the package bitsandbytes, which is not installed ({error}); "
            f"pip install bitsandbytes, or {instead}"
        ) from None


def _quantised(linear: nn.Linear, compute_dtype: torch.dtype, device: torch.device, library: Any) -> Any:
    kinds: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": False}
    with torch.device("meta"):
        held = library.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=compute_dtype, **kinds
        )
    weight = library.nn.Params4bit(linear.weight.detach(), requires_grad=False, module=held, **kinds)
    held.weight = weight.to(device)
    if linear.bias is not None:
        # it would round it in its first forward
        held.bias = nn.Parameter(linear.bias.detach().to(device, compute_dtype), requires_grad=False)
    # one layout and one kernel: its other one changes the weight in an evaluation
    held.support_avx512bf16_for_cpu = False
    held.register_buffer("absmax", held.quant_state.absmax)
    held._save_to_state_dict = partial(nn.Module._save_to_state_dict, held)
    return held.train(linear.training)
