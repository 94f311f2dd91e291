"""A checkpoint's weights one tensor at a time, straight from its files: whoever only passes them on holds no model.

For models whose files name every weight as the module does (`engine.weights.llama_config`); others are loaded by
transformers, which knows what was renamed, merged or packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core.errors import ModelError
from .causal_lm import DTYPES, PreTrainedModel
from .chunks import not_finite
from .left_over import FLOATS
from .llama_config import EMBEDDING, HEAD, LlamaConfig, weight_shapes
from .loading import load_causal_lm, load_hf_config, refuse_not_finite
from .weight_files import ADAPTER_FILE, StoredTensor, first_line, tensors_in, weight_files

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = (None, *DTYPES.values(), torch.float16)


@dataclass(slots=True, kw_only=True)
class StoredWeights:
    """The weights of one folder, in the order and under the names that a loaded model would give them."""

    found: Mapping[str, StoredTensor]
    "all that is stored"
    stored_names: Mapping[str, str]
    "what each of the model's weights is called there"
    config: Any
    "Hugging Face's"
    dtype: torch.dtype
    "that the model is used in"
    device = torch.device("cpu")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every weight, tied ones once."""
        return {name: self.found[stored].shape for name, stored in self.stored_names.items()}

    def num_parameters(self) -> int:
        """Numbers that are the model's weights."""
        return sum(map(prod, self.shapes.values()))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the model's type, mapped from its file where that is the file's.

        Raises ModelError: a file is gone, damaged, or has another tensor of that name by now.
        """
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, stored in self.stored_names.items():
                path, shape, _ = self.found[stored]
                try:
                    if path not in opened:
                        opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                    tensor: Tensor = opened[path].get_tensor(stored)
                except (OSError, SafetensorError) as error:
                    raise ModelError(
                        f"the weight file {path} can no longer be read as it was when it was checked: "
                        f"{first_line(error)}; let nothing write to a model's folder while a run starts"
                    ) from error
                if tuple(tensor.shape) != shape:
                    raise ModelError(
                        f"the weight file {path} has changed since it was checked: {stored} was expected of shape "
                        f"{shape}, got {tuple(tensor.shape)}; let nothing write to it while a run starts"
                    )
                yield name, tensor.to(self.dtype)


def load_weights(
    name: str, dtype: str, *, trust_remote_code: bool = False
) -> StoredWeights | PreTrainedModel:
    """A causal LM's weights: straight from its files where they can be, else as `load_causal_lm`; errors as there."""
    config = load_hf_config(name, trust_remote_code=trust_remote_code)
    stored = stored_weights(name, config, dtype)
    if stored is None:
        return load_causal_lm(name, dtype, trust_remote_code=trust_remote_code)
    # as they are rounded, and one after the other: what is finite in its file may not be then
    refuse_not_finite(name, [key for key, one in stored.tensors() if not_finite([(key, one)])])
    return stored


def stored_weights(name: str, config: Any, dtype: str) -> StoredWeights | None:
    """Return a local checkpoint's weights; None where transformers must build the model and load it.

    Args:
        name: path of a folder, or anything else.
        config: the Hugging Face config of it.
        dtype: that the model is to be used in.

    Raises:
        ModelError: a weight file is missing or cut.
    """
    folder = Path(name).expanduser()
    if not _is_usual(config) or not folder.is_dir() or (folder / ADAPTER_FILE).exists():
        return None
    config = deepcopy(config)
    config.dtype = DTYPES[dtype]
    try:
        shapes = weight_shapes(LlamaConfig.of(config.to_json_string(use_diff=False)))
    except ModelError:
        return None
    paths = weight_files(folder)
    if any(path.suffix != ".safetensors" for path in paths):
        return None
    found, stored_names = tensors_in(paths), {}
    for name, shape in shapes.items():
        names = [HEAD, EMBEDDING] if name == HEAD and config.tie_word_embeddings else [name]
        # a file that holds both of two tied weights may hold two values, and transformers does not tie them then
        held = [one for one in names if one in found]
        if len(held) != 1 or found[held[0]].shape != shape or found[held[0]].dtype not in FLOATS:
            return None
        stored_names[name] = held[0]
    return StoredWeights(found=found, stored_names=stored_names, config=config, dtype=config.dtype)


def _is_usual(config: Any) -> bool:
    """Whether a config asks transformers for nothing but a Llama or kin of its own, which it can build."""
    expected = ARCHITECTURES.get(config.model_type)
    if expected is None or (config.architectures or [expected]) != [expected] or hasattr(config, "auto_map"):
        return False
    attends, pad = config._attn_implementation in (None, "eager", "sdpa"), config.pad_token_id or 0
    return attends and config.dtype in _DTYPES and -1 <= pad < config.vocab_size
