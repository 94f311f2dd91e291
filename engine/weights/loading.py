"""Loads Hugging Face causal LMs and tokenizers, and says clearly when it cannot."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.configuration_utils import PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.errors import ModelError
from ...core.outside import is_lfs_pointer
from .causal_lm import DTYPES, PreTrainedModel
from .chunks import describe_not_finite, not_finite
from .config_json import require_config_read
from .left_over import plain_weight_settings, require_taken, require_writer
from .llama_config import MAX_LAYERS
from .weight_files import ADAPTER_FILE, first_line, require_all_weights, require_no_adapter, unequal_ties

_CONFIG = "config.json of the model"
logger = logging.getLogger(__name__)
_MEND = {
    "tokenizer": "save the tokenizer there with its save_pretrained (tokenizer.json, tokenizer_config.json), "
    "or set models.tokenizer to where it is",
    "model": "save the model again with save_pretrained, or copy or download it again",
    _CONFIG: "fix it, or save the model again with save_pretrained",
}

HUB_TIMEOUT_S = 10.0
"Until the hub must have answered; a machine without one should not wait longer."
_FIRST_READ = ("config.json", "tokenizer_config.json")


@lru_cache(maxsize=64)
def _hub_fault(name: str, _minutes: int) -> str:
    """Why the hub does not give a model; empty where it does. It is asked again after some minutes."""
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the client raises whatever its transport does
        return f"the hub does not give it ({type(error).__name__}: {first_line(error)})"
    return ""


@cache
def _register_renamed() -> None:
    """Let transformers read checkpoints of a family it does not know, where the model is one that it knows.

    MiMo-7B (arXiv 2505.07608) brings code of its own, which is Qwen2's with an MTP layer beside it that no forward of
    the model calls: its config is read as Qwen2's, and its code is neither needed nor run.
    """
    # seconds of import, where a config is read and not before
    from transformers import Qwen2Config

    class MimoConfig(Qwen2Config):
        model_type = "mimo"

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **settings: Any) -> Any:
            others = ("model_type", "architectures", "auto_map", "num_nextn_predict_layers")
            values = {key: value for key, value in config_dict.items() if key not in others}
            return Qwen2Config.from_dict(values | {"architectures": ["Qwen2ForCausalLM"]}, **settings)

    AutoConfig.register(MimoConfig.model_type, MimoConfig, exist_ok=True)


@contextmanager
def _reading(what: str, name: str) -> Iterator[None]:
    """Let transformers read a model's files; where the hub does not give them, from the hub's cache alone.

    It asks for each file, up to six times. Raises ModelError: neither hub nor cache has them, or whatever they lead to.
    """
    _register_renamed()
    before = constants.HF_HUB_OFFLINE
    try:
        may_ask = not (before or Path(name).expanduser().exists())
        fault = _hub_fault(name, int(time.monotonic() // 300)) if may_ask else ""
        if fault and not any(isinstance(try_to_load_from_cache(name, file), str) for file in _FIRST_READ):
            raise OSError(fault)
        if fault:
            logger.warning("%s is read as it lies in the hub's cache: %s", name, fault)
        constants.HF_HUB_OFFLINE = before or bool(fault)
        yield
    except (MemoryError, torch.OutOfMemoryError, ModelError):
        raise
    except Exception as error:  # the files are the user's
        raise ModelError(_cannot_load(what, name, error)) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer by path or hub name. Raises ModelError."""
    with _reading("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.get_vocab():
        raise ModelError(_cannot_load("tokenizer", name, ValueError("its vocabulary is empty")))
    return tokenizer


def load_causal_lm(name: str, dtype: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal LM by path or hub name, in eval mode, without gradients.

    Raises ModelError: it cannot be loaded, lacks weights, or has weights that are not finite.
    """
    return load_model(AutoModelForCausalLM, name, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)


def load_model(auto_class: Any, name: str, **settings: Any) -> PreTrainedModel:
    """Load a model of any kind; arguments of `from_pretrained`, errors as above.

    Raises ModelError besides: a causal LM's weights stay quantized, or its files hold two values of one weight.
    """
    if auto_class == AutoModelForCausalLM:
        config = load_hf_config(name, trust_remote_code=settings.get("trust_remote_code", False))
        require_writer(name, config)
        settings = settings | plain_weight_settings(name, config)
        require_no_adapter(name)
    with _reading("model", name):
        model, info = auto_class.from_pretrained(name, output_loading_info=True, **settings)
    require_all_weights(name, info["missing_keys"], info["unexpected_keys"])
    require_taken(name, model, info["unexpected_keys"])
    require_finite(name, model.named_parameters())
    _require_ties(name, model)
    return freeze(model)


def _require_ties(name: str, model: PreTrainedModel) -> None:
    """Raise ModelError where transformers has left two weights untied, with a warning, that the config ties."""
    if not model.config.get_text_config().tie_word_embeddings:
        return
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    owned = [
        names.get(id(getattr(module, "weight", None)))
        for module in (model.get_output_embeddings(), model.get_input_embeddings())
    ]
    ties = getattr(model, "_tied_weights_keys", None) or {}
    if owned[0] != owned[1] and owned[0] in ties and owned[1] is not None:
        raise unequal_ties(name, str(owned[0]), owned[1])


def require_finite(name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError when a weight of a model is NaN or infinite, naming the tensor."""
    refuse_not_finite(name, not_finite(tensors))


def refuse_not_finite(name: str, odd: Sequence[str]) -> None:
    """Raise the ModelError above where any tensor is named."""
    if odd:
        raise ModelError(
            f"the weights of the model '{name}' cannot be used: {describe_not_finite(odd)}; take a checkpoint "
            "from before its training diverged, or copy or download it again"
        )


def load_hf_config(name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load only a model's config. Raises ModelError."""
    with _reading(_CONFIG, name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        require_config_read(name, PretrainedConfig.get_config_dict(name)[0], config)
    return config


def meta_model(
    name: str, config: PretrainedConfig, auto_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Build the module of a model's config on the meta device: shapes, no memory. Raises ModelError."""
    text = config.get_text_config().to_dict()
    num_layers = text.get("num_hidden_layers", 1)
    if not isinstance(num_layers, int) or not 0 < num_layers <= MAX_LAYERS:
        raise ModelError(
            f"the config.json of '{name}' has num_hidden_layers {num_layers}; expected 1 to {MAX_LAYERS}; fix it"
        )
    _require_positive(name, text, ("rms_norm_eps", "layer_norm_eps", "norm_eps", "rope_theta"))
    _require_positive(name, text.get("rope_parameters") or {}, ("rope_theta",))
    try:
        with torch.device("meta"):
            return auto_class.from_config(config)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # sizes that do not go together, no such class
        raise ModelError(
            f"the config.json of '{name}' describes no model that can be built as {auto_class.__name__} "
            f"(model_type '{config.model_type}'): {first_line(error)}; fix it or take another model"
        ) from error


def _require_positive(name: str, section: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raise ModelError for numbers that a module takes as they are, and computes NaN with."""
    for key in keys:
        value = section.get(key)
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ModelError(
                f"the config.json of '{name}' has {key} {value}; expected a number above 0; fix it"
            )


def build_causal_lm(hf_config_json: str, dtype: str, *, on_meta: bool = False) -> PreTrainedModel:
    """Build the module a manifest describes, weights uninitialised, `on_meta` on the meta device. Raises ModelError."""
    tree = json.loads(hf_config_json)
    try:
        config = AutoConfig.for_model(**tree)
        # to draw weights that are overwritten takes seconds; what the constructors compute (rotations) stays
        with no_init_weights(), _parameters_on_meta() if on_meta else nullcontext():
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
        model.tie_weights()
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"cannot build a '{tree.get('model_type')}' model from its config: {error}"
        ) from error
    return freeze(model)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let parameters of modules that are made here take no memory; other tensors (rotations) are made as always."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Put a model into eval mode and switch its gradients off."""
    return model.eval().requires_grad_(False)


def num_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many ids the tokenizer knows; a model's padded ids lie above."""
    return max(tokenizer.get_vocab().values()) + 1


def _whole_model(adapter: Path) -> str:
    """What to name in an adapter's stead: a run writes the merged model beside it."""
    merged = adapter.with_name(adapter.name.replace("adapter", "target"))
    if merged != adapter and (merged / "config.json").is_file():
        return f"expected a whole model; name the merged one that stands beside it, {merged}"
    return "expected a whole model; merge it (peft's merge_and_unload, then save_pretrained) and name that folder"


def _cannot_load(what: str, name: str, error: Exception) -> str:
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not path.exists():
        return f"cannot load the {what}: {name} does not exist; expected a folder saved by save_pretrained"
    if path.is_file():
        return f"cannot load the {what}: {name} is a file; expected the folder saved by save_pretrained"
    if (path / ADAPTER_FILE).is_file() and not (path / "config.json").is_file():
        return f"cannot load the {what}: {name} is an adapter alone; {_whole_model(path)}"
    pointers = [entry for entry in sorted(path.iterdir()) if is_lfs_pointer(entry)] if path.is_dir() else []
    if pointers and what == "tokenizer":
        return (
            f"cannot load the {what} from the folder {name}: {pointers[0].name} is a pointer of Git LFS, not the file "
            "itself; fetch it (`git lfs pull` in its repository)"
        )
    if "trust_remote_code" in str(error):
        return (
            f"cannot load the {what} of '{name}': it brings code of its own (auto_map), which is not run unasked; read "
            "it, and set models.trust_remote_code to true if it may run here"
        )
    no_type = re.match(r"module 'torch' has no attribute '(.+)'$", str(error))
    if no_type:
        return (
            f"cannot load the {what} of '{name}': it says dtype (or torch_dtype) '{no_type[1]}'; expected a type of "
            "torch such as float32, bfloat16 or float16; fix it"
        )
    snapshots = sorted((path / "snapshots").glob("*/config.json"))
    if snapshots and not (path / "config.json").is_file():
        return (
            f"cannot load the {what}: {name} is a folder of the hub's cache, expected a snapshot within it: name "
            f"{snapshots[-1].parent}"
        )
    if path.is_dir():
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        among = "" if what == _CONFIG and (path / "config.json").is_file() else f", which holds {held}"
        return f"cannot load the {what} from the folder {name}{among}: {first_line(error)}; {_MEND[what]}"
    return (
        f"cannot load the {what} '{name}' (a local folder or a hub name): {first_line(error)}; "
        "check the name, or, without a network, give the path of a folder"
    )
