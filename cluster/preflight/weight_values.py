"""The values of a run's first weights, read by `check`; a run finds what is not finite when it reads them itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from core.config import Config
from engine.weights.causal_lm import DTYPES
from engine.weights.chunks import not_finite
from engine.weights.loading import load_hf_config, refuse_not_finite
from engine.weights.quantized import quantization_of
from engine.weights.weight_files import local_folder, weight_files


def require_finite_weights(config: Config) -> None:
    """Read the weights of target and draft model, a tensor at a time, in the type that they are published in.

    Raises ModelError: one is NaN or infinite, in the words of a run that begins with it.
    """
    draft = config.models.draft if config.speculation.drafter == "model" else None
    for name in dict.fromkeys((config.models.target, draft)):
        folder = local_folder(name) if name is not None else None
        if name is None or folder is None:
            continue
        if quantization_of(load_hf_config(name, trust_remote_code=config.models.trust_remote_code)) is None:
            dtype = DTYPES[config.models.dtype]
            tensors = (pair for file in weight_files(folder) for pair in _tensors(file))
            odd = [key for key, tensor in tensors if not_finite([(key, _as_published(tensor, dtype))])]
            refuse_not_finite(name, odd)


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
