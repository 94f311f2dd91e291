"""Records of published weights; the chunks (uint8 arrays) travel beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from operator import attrgetter
from typing import Literal

DEVICE_BUCKET_BYTES = 256 << 20
"Between devices a larger bucket costs memory alone: the trainer has two of them, an instance one."
ALIGNMENT_BYTES = 16
"Every tensor is padded to a multiple of it."
DigestKind = Literal["xxh3", "words"]
"How checksums are computed: see `engine.weights.digests`."
WORDS = "words:"
"What checksums of the second kind begin with."


def kind_of(checksum: str) -> DigestKind:
    """How a checksum was computed; the empty one and its kind's beginning name a kind, too."""
    return "words" if checksum.startswith(WORDS) else "xxh3"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in the published byte stream."""

    name: str
    dtype: str
    "torch name without the prefix, such as float32"
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


def pieces_of(shape: tuple[int, ...], tensor_bytes: int, num_bytes: int) -> list[int]:
    """Bytes of whole rows that a tensor is cut into where it has more than `num_bytes`; each but the last is aligned.

    Rows are of the first dimension; one that is larger stays whole.
    """
    row_bytes = tensor_bytes // shape[0] if shape and shape[0] else 0
    # as many as end at an aligned place
    step = row_bytes * (ALIGNMENT_BYTES // gcd(row_bytes, ALIGNMENT_BYTES)) if row_bytes else 0
    if tensor_bytes <= num_bytes or not step:
        return [tensor_bytes]
    size = max(num_bytes // step, 1) * step
    return [min(size, tensor_bytes - at) for at in range(0, tensor_bytes, size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Describes one published version of one model; the chunks (uint8 arrays) travel beside it."""

    model: str
    "'target', 'draft', or 'teacher', which stays as it is"
    weight_version: int
    checksum: str
    "over all tensors in order; it names its kind (`engine.weights.digests`)"
    num_bytes: int
    chunk_num_bytes: tuple[int, ...]
    chunk_checksums: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    hf_config_json: str
    "the model's Hugging Face config: an instance builds the module from it"
    schema_version: int = 1

    def in_chunks_of(self, num_bytes: int) -> WeightManifest:
        """The same stream in chunks that are closed before they would grow larger, without digests.

        A tensor that is larger is cut by rows, into chunks of its own.
        """
        sizes, used = [], 0
        for spec in self.tensors:
            padded = spec.num_bytes + -spec.num_bytes % ALIGNMENT_BYTES
            pieces = pieces_of(spec.shape, spec.num_bytes, num_bytes)
            if used and (len(pieces) > 1 or used + padded > num_bytes):
                sizes.append(used)
                used = 0
            if len(pieces) > 1:
                sizes += [size + -size % ALIGNMENT_BYTES for size in pieces]
            else:
                used += padded
        sizes += [used] if used else []
        return replace(self, chunk_num_bytes=tuple(sizes), chunk_checksums=())

    def describes_what(self, other: WeightManifest) -> bool:
        """Whether it has the weights of another manifest, in whatever chunks."""
        what = attrgetter("model", "weight_version", "checksum", "tensors")
        return what(self) == what(other)
