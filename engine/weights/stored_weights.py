"""A checkpoint's weights one tensor at a time, straight from its files: whoever only passes them on holds no model.

For models whose files name every weight as the module does (`engine.weights.llama_config`); others are loaded by
transformers, which knows what was renamed, merged or packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core.errors import ModelError
from .causal_lm import DTYPES
from .llama_config import EMBEDDING, HEAD, LlamaConfig, weight_shapes
from .weight_files import ADAPTER_FILE, first_line, shapes_in, weight_files

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class StoredWeights:
    """The weights of one folder, in the order and under the names that a loaded model would give them."""

    def __init__(
        self,
        files: dict[str, Path],
        stored_names: dict[str, str],
        shapes: dict[str, tuple[int, ...]],
        hf_config_json: str,
    ) -> None:
        """`files`: where each stored tensor is; `stored_names`: what each of the model's is called there."""
        self._files = files
        self._stored_names = stored_names
        self._shapes = shapes
        self.hf_config_json = hf_config_json

    @property
    def tensor_names(self) -> list[str]:
        """As `unique_tensors` of the loaded model."""
        return list(self._stored_names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor as stored, mapped from its file: to be read before the next is asked for.

        Raises ModelError: a file is gone, damaged, or has another tensor of that name by now.
        """
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, stored in self._stored_names.items():
                path = self._files[stored]
                try:
                    if path not in opened:
                        opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                    tensor: Tensor = opened[path].get_tensor(stored)
                except (OSError, SafetensorError) as error:
                    raise ModelError(
                        f"the weight file {path} can no longer be read as it was when it was checked: "
                        f"{first_line(error)}; let nothing write to a model's folder while a run starts"
                    ) from error
                if tuple(tensor.shape) != self._shapes[name]:
                    raise ModelError(
                        f"the weight file {path} has changed since it was checked: {stored} was expected of shape "
                        f"{self._shapes[name]}, got {tuple(tensor.shape)}; let nothing write to it while a run starts"
                    )
                yield name, tensor


def stored_weights(name: str, config: Any, dtype: str) -> StoredWeights | None:
    """Return a local checkpoint's weights; None where transformers must load it.

    Args:
        name: path of a folder, or anything else.
        config: the Hugging Face config of it.
        dtype: that the model is to be used in; the config says so afterwards.

    Raises:
        ModelError: a weight file is missing or cut.
    """
    folder, kind = Path(name).expanduser(), config.model_type
    expected = ARCHITECTURES.get(kind)
    if not folder.is_dir() or expected is None or (config.architectures or [expected]) != [expected]:
        return None
    if (folder / ADAPTER_FILE).exists():
        return None
    config.dtype = DTYPES[dtype]
    text = config.to_json_string(use_diff=False)
    try:
        shapes = weight_shapes(LlamaConfig.of(text))
    except ModelError:
        return None
    paths = weight_files(folder)
    if any(path.suffix != ".safetensors" for path in paths):
        return None
    found = {key: (path, shape) for path in paths for key, shape in shapes_in(path)}
    stored_names = {}
    for name, shape in shapes.items():
        names = [HEAD, EMBEDDING] if name == HEAD and config.tie_word_embeddings else [name]
        # a file that holds both of two tied weights may hold two values, and transformers does not tie them then
        held = [one for one in names if one in found]
        if len(held) != 1 or found[held[0]][1] != shape:
            return None
        stored_names[name] = held[0]
    return StoredWeights({key: path for key, (path, _) in found.items()}, stored_names, shapes, text)
