"""Packs a model's weights into checksummed chunks and back (design 3.5, weights by manifest).

The byte stream holds the tensors of `state_dict` in name order, tied tensors once. Chunks are plain
uint8 arrays: they travel through any object store without torch's serialisation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod
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
    """Copy a model's weights, in the types they have, into chunks; see `pack_tensors`."""
    return pack_tensors(
        unique_tensors(model),
        hf_config_json=model.config.to_json_string(use_diff=False),
        name=name,
        weight_version=weight_version,
        chunk_bytes=chunk_bytes,
    )


def pack_tensors(
    tensors: Sequence[tuple[str, Tensor]],
    *,
    hf_config_json: str,
    name: Literal["target", "draft"],
    weight_version: int,
    chunk_bytes: int = 64 << 20,
) -> tuple[WeightManifest, list[np.ndarray]]:
    """Copy named tensors into chunks of `chunk_bytes` and describe them.

    All that is published or saved is packed here, so nothing that is not finite gets further.

    Returns:
        The manifest and the chunks, uint8 [chunk_bytes], the last one shorter.

    Raises:
        NotFiniteError: a weight is NaN or infinite; it names the tensor.
        WeightsError: `chunk_bytes` is less than 1.
    """
    if chunk_bytes < 1:
        raise WeightsError(f"expected chunks of at least 1 byte, got chunk_bytes {chunk_bytes}")
    odd = not_finite(tensors)
    if odd:
        raise NotFiniteError(
            f"the {name} weights of version {weight_version} are not published: "
            f"{describe_not_finite(odd)}; lower the learning rate"
        )
    specs: list[TensorSpec] = []
    parts: list[np.ndarray] = []
    offset = 0
    for tensor_name, tensor in tensors:
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
        hf_config_json=hf_config_json,
    )
    return manifest, chunks


def unpack_weights(manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Verify every chunk and where each tensor lies, and return the named tensors (copies, writable).

    The checksum of the whole is that of the loaded model (`model_checksum`), which every instance confirms.

    Raises WeightsError naming the chunk or the tensor that does not match.
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
    for spec in manifest.tensors:
        needed = prod(spec.shape) * _dtype(spec.dtype).itemsize
        if spec.num_bytes != needed or not 0 <= spec.offset_bytes <= len(stream) - needed:
            raise WeightsError(
                f"{who}: '{spec.name}' of shape {list(spec.shape)}, {spec.dtype}, takes {needed} bytes; the manifest "
                f"says {spec.num_bytes} at {spec.offset_bytes} of {len(stream)}; pack the weights again"
            )
    return {
        spec.name: stream[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        .view(_dtype(spec.dtype))
        .reshape(spec.shape)
        for spec in manifest.tensors
    }


def require_loadable(manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightsError for weights of an unknown model or version, NotFiniteError for NaN or infinity."""
    who = f"{manifest.model} weights version {manifest.weight_version}"
    if manifest.model not in ("target", "draft") or manifest.weight_version < 0:
        raise WeightsError(
            f"{who} are not loaded: expected those of target or draft, of a version of at least 0"
        )
    if odd := not_finite(tensors.items()):
        raise NotFiniteError(f"{who} are not loaded: {describe_not_finite(odd)}")


def load_into(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Copy named tensors into a model in place; tied tensors follow.

    Raises WeightsError when names, shapes or types do not fit the model; nothing is copied then.
    """
    own = dict(unique_tensors(model))
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise WeightsError(f"weights do not fit the model: {len(odd)} names differ, first '{odd[0]}'")
    for name, tensor in tensors.items():
        mine = own[name]
        if mine.shape != tensor.shape:
            raise WeightsError(
                f"weight {name}: expected shape {tuple(mine.shape)}, got {tuple(tensor.shape)}"
            )
        # between float types a copy rounds as it should; into others it would cut
        if mine.dtype != tensor.dtype and not (mine.is_floating_point() and tensor.is_floating_point()):
            raise WeightsError(f"weight {name}: expected {mine.dtype}, got {tensor.dtype}")
    with torch.no_grad():
        for name, tensor in tensors.items():
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
    return checksum_of(tensor for _, tensor in unique_tensors(model))


def checksum_of(tensors: Iterable[Tensor]) -> str:
    """Return the checksum that `pack_tensors` would put into the manifest."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        raw = _to_bytes(tensor)
        digest.update(raw.tobytes())
        digest.update(bytes(-len(raw) % ALIGNMENT_BYTES))
    return digest.hexdigest()


def unique_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
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
