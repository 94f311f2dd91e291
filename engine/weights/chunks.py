"""Packs a model's weights into checksummed chunks and back (design 3.5, weights by manifest).

The byte stream holds the tensors of `state_dict` in name order, tied tensors once. Chunks are plain
uint8 arrays: they travel through any object store without torch's serialisation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from core.errors import NotFiniteError, WeightsError
from core.records import TensorSpec, WeightManifest

ALIGNMENT_BYTES = 16


def pack_weights(
    model: PreTrainedModel,
    *,
    name: Literal["target", "draft"],
    weight_version: int,
    chunk_bytes: int = 64 << 20,
) -> tuple[WeightManifest, list[np.ndarray]]:
    """Copy the weights into chunks of `chunk_bytes` and describe them.

    All that is published or saved is packed here, so nothing that is not finite gets further.

    Returns:
        The manifest and the chunks, uint8 [chunk_bytes], the last one shorter.

    Raises:
        NotFiniteError: a weight is NaN or infinite; it names the tensor.
    """
    unique = _unique_tensors(model)
    odd = not_finite(unique)
    if odd:
        raise NotFiniteError(
            f"the {name} weights of version {weight_version} are not published: "
            f"{describe_not_finite(odd)}; lower the learning rate"
        )
    specs: list[TensorSpec] = []
    parts: list[np.ndarray] = []
    offset = 0
    for tensor_name, tensor in unique:
        raw = _to_bytes(tensor)
        pad = -len(raw) % ALIGNMENT_BYTES
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(
            TensorSpec(
                name=tensor_name,
                dtype=dtype,
                shape=tuple(tensor.shape),
                offset_bytes=offset,
                num_bytes=len(raw),
            )
        )
        parts += [raw, np.zeros(pad, np.uint8)]
        offset += len(raw) + pad
    stream = np.concatenate(parts)
    chunks = [stream[start : start + chunk_bytes].copy() for start in range(0, len(stream), chunk_bytes)]
    manifest = WeightManifest(
        model=name,
        weight_version=weight_version,
        checksum=_digest(stream),
        num_bytes=len(stream),
        chunk_num_bytes=tuple(len(chunk) for chunk in chunks),
        chunk_checksums=tuple(_digest(chunk) for chunk in chunks),
        tensors=tuple(specs),
        hf_config_json=model.config.to_json_string(use_diff=False),
    )
    return manifest, chunks


def unpack_weights(manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Verify every chunk and the whole, and return the named tensors (copies, writable).

    Raises WeightsError naming the chunk that does not match.
    """
    who = f"{manifest.model} weights version {manifest.weight_version}"
    if len(chunks) != len(manifest.chunk_checksums):
        raise WeightsError(
            f"{who}: expected {len(manifest.chunk_checksums)} chunks, got {len(chunks)}; re-send"
        )
    for index, (chunk, expected) in enumerate(zip(chunks, manifest.chunk_checksums, strict=True)):
        got = _digest(chunk)
        if got != expected:
            raise WeightsError(
                f"{who}: chunk {index} of {len(chunks)} has checksum {got}, expected {expected}; re-send"
            )
    stream = torch.from_numpy(np.concatenate(list(chunks)))
    return {
        spec.name: stream[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        .view(_dtype(spec.dtype))
        .reshape(spec.shape)
        for spec in manifest.tensors
    }


def load_into(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Copy named tensors into a model in place; tied tensors follow.

    Raises WeightsError when names or shapes do not fit the model.
    """
    own = dict(_unique_tensors(model))
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise WeightsError(f"weights do not fit the model: {len(odd)} names differ, first '{odd[0]}'")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if own[name].shape != tensor.shape:
                raise WeightsError(
                    f"weight {name}: expected shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}"
                )
            own[name].copy_(tensor)


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinity.

    A sum tells at the cost of one read of the weights; only where it is not finite is each value looked at.
    """
    floats = [(name, tensor.detach()) for name, tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return []
    # one wait for the device, not one a tensor
    sums = torch.stack([tensor.sum(dtype=torch.float32) for _, tensor in floats])
    suspects = [pair for pair, good in zip(floats, sums.isfinite().tolist(), strict=True) if not good]
    return [name for name, tensor in suspects if not bool(tensor.isfinite().all())]


def describe_not_finite(names: Sequence[str]) -> str:
    """Words for an error: which tensors, of those that `not_finite` returned."""
    others = f" and {len(names) - 1} other tensors hold" if len(names) > 1 else " holds"
    return f"expected finite numbers, but '{names[0]}'{others} NaN or infinity"


def model_checksum(model: PreTrainedModel) -> str:
    """Return the checksum that `pack_weights` would put into the manifest."""
    digest = hashlib.blake2b(digest_size=16)
    for _, tensor in _unique_tensors(model):
        raw = _to_bytes(tensor)
        digest.update(raw.tobytes())
        digest.update(bytes(-len(raw) % ALIGNMENT_BYTES))
    return digest.hexdigest()


def _unique_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers in name order, each storage once."""
    seen: set[int] = set()
    unique = []
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        unique.append((name, tensor.detach()))
    return unique


def _to_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _dtype(name: str) -> torch.dtype:
    return torch.empty(0, dtype=torch.__dict__[name]).dtype


def _digest(data: np.ndarray) -> str:
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
