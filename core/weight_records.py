"""Records of published weights; the chunks (uint8 arrays) travel beside them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in the published byte stream."""

    name: str
    dtype: str
    "torch name without the prefix, such as float32"
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Describes one published version of one model; the chunks (uint8 arrays) travel beside it."""

    model: str
    "'target' or 'draft'"
    weight_version: int
    checksum: str
    "hex digest over all bytes in order"
    num_bytes: int
    chunk_num_bytes: tuple[int, ...]
    chunk_checksums: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    hf_config_json: str
    "the model's Hugging Face config: an instance builds the module from it"
    schema_version: int = 1
