"""Packs a model's weights into checksummed chunks and back (design 3.5, weights by manifest).

The byte stream holds the tensors of `state_dict` in name order, tied tensors once. A chunk is a flat bucket of whole
tensors, or between devices of some rows of a large one, a plain uint8 array: it travels through any object store
without torch's serialisation, and tensors are views of it on the other side. There is a checksum of every chunk and
one of the whole (`engine.weights.digests`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import NotFiniteError, WeightsError
from ...core.weight_records import ALIGNMENT_BYTES, DigestKind, TensorSpec, WeightManifest, kind_of, pieces_of
from .causal_lm import CausalLM
from .digests import Digest, HostMirror, read_once, read_only

PublishedName = Literal["target", "draft", "teacher"]
CHUNK_BYTES = 32 << 20
"A tensor that is larger is a chunk of its own."


class WeightPacker:
    """Packs named tensors, as they come, into chunks of whole tensors; describes them when all are packed.

    All that is published or saved is packed here, so nothing that is not finite gets further.
    """

    def __init__(
        self,
        *,
        name: PublishedName,
        weight_version: int,
        hf_config_json: str,
        dtypes: Mapping[str, torch.dtype] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        cuts: bool = False,
        rooms: int | Sequence[Tensor] = 0,
        device: torch.device | None = None,
        kind: DigestKind = "xxh3",
    ) -> None:
        """Prepare for one version of one model.

        Args:
            name: which model.
            weight_version: its version.
            hf_config_json: from which the module can be built.
            dtypes: types to round to, by tensor; others keep theirs.
            chunk_bytes: a chunk is closed before it would grow larger.
            cuts: a tensor that is larger is cut by rows, as `WeightManifest.in_chunks_of` does; else it is one chunk.
            rooms: buffers to write chunks into in turn, so that whoever takes one has done with it before `rooms`
                more are asked for, or these buffers themselves; 0: each chunk has a buffer of its own.
            device: where buckets are packed, and lie when they are asked for as tensors; None: the host.
            kind: of the checksum of the whole, and of what `buckets` are compared by.

        Raises:
            WeightsError: `chunk_bytes` is less than 1.
        """
        if chunk_bytes < 1:
            raise WeightsError(f"expected chunks of at least 1 byte, got chunk_bytes {chunk_bytes}")
        self._name, self._version, self._config = name, weight_version, hf_config_json
        self._dtypes = dtypes or {}
        self._chunk_bytes, self._cuts = chunk_bytes, cuts
        self._device = device or torch.device("cpu")
        self._mirror = None if device is None else HostMirror()
        own = [torch.empty(0, dtype=torch.uint8)] * rooms if isinstance(rooms, int) else rooms
        self._rooms = list(own)
        self._specs: list[TensorSpec] = []
        self._sizes: list[int] = []
        self._digests: list[str] = []
        self._kind: DigestKind = kind
        self._whole = Digest(kind)
        self._extremes: list[tuple[list[str], Tensor]] = []
        "of each bucket that stayed on the device"
        self._begins_at = 0
        "where the piece in the bucket begins in its tensor"

    def pack(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[WeightManifest, list[np.ndarray]]:
        """Return the manifest and all `chunks` at once, a whole copy of the model; raises what `chunks` does."""
        chunks = list(self.chunks(tensors))
        return self.manifest(), chunks

    def chunks(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[np.ndarray]:
        """Copy the tensors one by one, rounding to nearest, and yield each chunk, uint8 [n], when it is full.

        Raises NotFiniteError before a chunk with a NaN or an infinity gets out; it names the tensor.
        """
        for bucket, views in self._packed(tensors):
            yield self._to_host(bucket, views)

    def buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
        """Do as `chunks`, and yield each as a tensor, uint8 [n], on the packer's device.

        With `words` nothing waits for the device: whoever takes them waits for `sums`, which raise what is raised.
        """
        for bucket, views in self._packed(tensors):
            if self._kind == "xxh3":
                self._to_host(bucket, views)
            else:
                self._sizes.append(len(bucket))
                self._take(views)
                self._extremes.append(extremes(views))
            yield bucket

    def _packed(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[Tensor, list[tuple[str, Tensor]]]]:
        """Every bucket, uint8 [n], with the tensors in it."""
        room, used, views = torch.empty(0, dtype=torch.uint8), 0, []
        for name, tensor in tensors:
            dtype = self._dtypes.get(name, tensor.dtype)
            size = tensor.numel() * dtype.itemsize
            padded = size + -size % ALIGNMENT_BYTES
            pieces = pieces_of(tuple(tensor.shape), size, self._chunk_bytes) if self._cuts else [size]
            if used and (len(pieces) > 1 or used + padded > self._chunk_bytes):
                yield room[:used], views
                used, views = 0, []
            self._specs.append(
                TensorSpec(
                    name=name,
                    dtype=str(dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    offset_bytes=sum(self._sizes) + used,
                    num_bytes=size,
                )
            )
            at = 0
            for one in pieces:
                padded = one + -one % ALIGNMENT_BYTES
                if not used:
                    room = self._room(padded)
                rows = tensor.detach() if len(pieces) == 1 else _rows(tensor.detach(), at, one, size)
                place = room[used : used + one].view(dtype).view(rows.shape)
                place.copy_(rows)
                room[used + one : used + padded] = 0
                views.append((name, place))
                used += padded
                if len(pieces) > 1:
                    self._begins_at = at
                    yield room[:used], views
                    self._begins_at, used, views = 0, 0, []
                at += one
        if used:
            yield room[:used], views

    def manifest(self) -> WeightManifest:
        """Describe what has been packed."""
        return WeightManifest(
            model=self._name,
            weight_version=self._version,
            checksum=self._whole.text(),
            num_bytes=sum(self._sizes),
            chunk_num_bytes=tuple(self._sizes),
            chunk_checksums=tuple(self._digests),
            tensors=tuple(self._specs),
            hf_config_json=self._config,
        )

    def _room(self, least: int) -> Tensor:
        """Where the next chunk is written: in turn, larger where one tensor needs it."""
        turn = len(self._sizes) % max(len(self._rooms), 1)
        if self._rooms and len(self._rooms[turn]) >= least:
            return self._rooms[turn]
        room = torch.empty(max(self._chunk_bytes, least), dtype=torch.uint8, device=self._device)
        if self._rooms:
            self._rooms[turn] = room
        return room

    def sums(self) -> Int[np.ndarray, "n 2"]:
        """What buckets are compared by where they arrive: the XXH3 of each, or word sums of each tensor or piece.

        Waits for the device once. Raises NotFiniteError as `chunks`.
        """
        names = [name for named, _ in self._extremes for name in named]
        ends = torch.cat([ends for _, ends in self._extremes] or [torch.zeros(0, 2)])
        sums, finite = self._whole.read(ends.isfinite().all(1))
        self._require_finite([name for name, good in zip(names, finite, strict=True) if not good])
        return sums

    def _require_finite(self, odd: Collection[str]) -> None:
        """Raise NotFiniteError where any tensor is named that is not."""
        if odd:
            raise NotFiniteError(
                f"the {self._name} weights of version {self._version} are not published: "
                f"{describe_not_finite([*dict.fromkeys(odd)])}; lower the learning rate"
            )

    def _to_host(self, bucket: Tensor, views: Sequence[tuple[str, Tensor]]) -> np.ndarray:
        """The bucket's bytes on the host, where they have their checksum."""
        chunk = bucket.numpy() if self._mirror is None else self._mirror.of(bucket)
        dtypes = {view.dtype for _, view in views}
        digest, is_sound = read_once(chunk, dtypes, self._whole if self._kind == "xxh3" else None)
        if not is_sound:
            self._require_finite(not_finite(views))
        if self._kind == "words":
            self._take(views)
        self._sizes.append(len(chunk))
        self._digests.append(digest)
        return chunk

    def _take(self, views: Sequence[tuple[str, Tensor]]) -> None:
        """Let the whole take these tensors, or the one piece among them."""
        for _, view in views:
            self._whole.add(view, self._begins_at)


def _rows(tensor: Tensor, at: int, num_bytes: int, tensor_bytes: int) -> Tensor:
    """The rows of a tensor of so many bytes that have these, from byte `at` on."""
    row_bytes = tensor_bytes // len(tensor)
    return tensor[at // row_bytes : (at + num_bytes) // row_bytes]


def pack_weights(
    model: CausalLM,
    *,
    name: PublishedName,
    weight_version: int,
    chunk_bytes: int = CHUNK_BYTES,
    kind: DigestKind = "xxh3",
) -> tuple[WeightManifest, list[np.ndarray]]:
    """Copy a model's weights, in the types they have, into chunks; see `WeightPacker.pack`."""
    config = model.config.to_json_string(use_diff=False)
    packer = WeightPacker(
        name=name, weight_version=weight_version, hf_config_json=config, chunk_bytes=chunk_bytes, kind=kind
    )
    return packer.pack(tensors_of(model))


def unpack_weights(manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Verify chunks and places as `weight_views` does, and return the named tensors (copies, writable)."""
    return {name: view.clone() for name, view in weight_views(manifest, chunks).items()}


def weight_views(
    manifest: WeightManifest, chunks: Sequence[np.ndarray], whole: Digest | None = None
) -> dict[str, Tensor]:
    """Verify every chunk and where each tensor lies, and return the named tensors: views of the chunks.

    They must be read only, as chunks in an object store are. `whole`, of kind `xxh3`, takes their bytes in the same
    pass: its text is the checksum of the whole, which every instance confirms of what it has laid out of them.

    Raises WeightsError naming the chunk or the tensor that does not match, NotFiniteError for NaN or infinity.
    """
    who = f"{manifest.model} weights version {manifest.weight_version}"
    if len(chunks) != len(manifest.chunk_checksums):
        raise WeightsError(
            f"{who}: expected {len(manifest.chunk_checksums)} chunks, got {len(chunks)}; re-send"
        )
    starts, views = chunk_starts(manifest), dict[str, Tensor]()
    dtypes = {_dtype(spec.dtype) for spec in manifest.tensors}
    has_odd = False
    for index, chunk in enumerate(chunks):
        got, is_finite = read_once(chunk, dtypes, whole)
        if got != (expected := manifest.chunk_checksums[index]):
            raise WeightsError(
                f"{who}: chunk {index} of {len(chunks)} has checksum {got}, expected {expected}; re-send"
            )
        has_odd = has_odd or not is_finite
    for spec in manifest.tensors:
        index = chunk_of(spec, starts)
        require_place(manifest, spec, starts[index], len(chunks[index]) if chunks else 0)
        # a storage of its own: transformers copies tensors that have one together before it writes them
        flat = read_only(chunks[index][spec.offset_bytes - starts[index] :][: spec.num_bytes])
        views[spec.name] = view_of(spec, flat, spec.offset_bytes)
    require_loadable(manifest, views if has_odd else {})
    return views


def chunk_starts(manifest: WeightManifest) -> list[int]:
    """Where each chunk starts in the byte stream."""
    return list(accumulate(manifest.chunk_num_bytes[:-1], initial=0))


def chunk_of(spec: TensorSpec, starts: Sequence[int]) -> int:
    """The number of the chunk that holds a tensor."""
    return max(bisect_right(starts, spec.offset_bytes) - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one chunk of a version brings, where cut tensors are put together again in one buffer."""

    num_bytes: int
    begins_at: int
    "where it begins there: behind what came of its tensor before, or at 0"
    piece_bytes: int
    "of the one tensor of which it has some rows; 0: its tensors are whole"
    ends: tuple[TensorSpec, ...]
    "tensors that are whole when it is there"
    start: int
    "place in the byte stream of the buffer's first byte"

    def views(self, room: Tensor) -> dict[str, Tensor]:
        """The tensors that are whole, of the buffer uint8 [n]."""
        return {spec.name: view_of(spec, room, self.start) for spec in self.ends}


def buckets_of(layout: WeightManifest) -> list[Bucket]:
    """The chunks of a layout in which large tensors may be cut."""
    found, starts = list[Bucket](), chunk_starts(layout)
    specs: list[list[TensorSpec]] = [[] for _ in starts]
    for spec in layout.tensors:
        specs[chunk_of(spec, starts)].append(spec)
    last = layout.tensors[0]
    for start, size, here in zip(starts, layout.chunk_num_bytes, specs, strict=True):
        last, begins_at = (here[-1], 0) if here else (last, start - last.offset_bytes)
        left = last.offset_bytes + last.num_bytes - start
        is_piece = not here or left > size
        ends = here if not is_piece else [last] if left <= size else []
        found.append(
            Bucket(
                num_bytes=size,
                begins_at=begins_at,
                piece_bytes=min(left, size) if is_piece else 0,
                ends=tuple(ends),
                start=start - begins_at,
            )
        )
    return found


def require_place(manifest: WeightManifest, spec: TensorSpec, start: int, num_bytes: int) -> None:
    """Raise WeightsError unless a tensor lies whole within its chunk of so many bytes."""
    needed = prod(spec.shape) * _dtype(spec.dtype).itemsize
    if spec.num_bytes != needed or not 0 <= spec.offset_bytes - start <= num_bytes - needed:
        raise WeightsError(
            f"{manifest.model} weights version {manifest.weight_version}: '{spec.name}' of shape {list(spec.shape)}, "
            f"{spec.dtype}, takes {needed} bytes; the manifest says {spec.num_bytes} at {spec.offset_bytes} of "
            f"{manifest.num_bytes}, in a chunk of {num_bytes} at {start}; pack the weights again"
        )


def view_of(spec: TensorSpec, chunk: Tensor, start: int) -> Tensor:
    """A tensor within its chunk, uint8 [n], which starts at `start` of the byte stream."""
    at = spec.offset_bytes - start
    return chunk[at : at + spec.num_bytes].view(_dtype(spec.dtype)).reshape(spec.shape)


def require_loadable(manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightsError for weights of an unknown model or version, NotFiniteError for NaN or infinity."""
    who = f"{manifest.model} weights version {manifest.weight_version}"
    if manifest.model not in get_args(PublishedName) or manifest.weight_version < 0:
        raise WeightsError(
            f"{who} are not loaded: expected those of {', '.join(get_args(PublishedName))}, of a version of at least 0"
        )
    if odd := not_finite(tensors.items()):
        raise NotFiniteError(f"{who} are not loaded: {describe_not_finite(odd)}")


def load_into(model: Any, tensors: dict[str, Tensor], *, copied: bool = True) -> None:
    """Copy named tensors into a model in place, or let it hold them, which nobody writes to then; tied ones follow.

    Raises WeightsError when names, shapes or types do not fit the model; nothing is changed then.
    """
    own = dict(unique_tensors(model))
    require_names(own, tensors)
    if copied:
        copy_over(own, tensors)
        return
    for name, tensor in tensors.items():
        require_fit(name, tensor, own[name].shape, own[name].dtype)
    for name, held in model.state_dict(keep_vars=True).items():
        if name in tensors:
            held.data = tensors[name].to(held.dtype)


def require_names(
    own: Iterable[str], names: Iterable[str], what: str = "weights do not fit the model"
) -> None:
    """Raise WeightsError, saying what is wrong, unless these are a model's tensors, all of them."""
    if odd := sorted(set(own) ^ set(names)):
        raise WeightsError(f"{what}: {len(odd)} names differ, first '{odd[0]}'")


def copy_over(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy some of a model's tensors in place. Raises WeightsError before any is copied when one does not fit."""
    for name, tensor in tensors.items():
        require_fit(name, tensor, own[name].shape, own[name].dtype)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def require_fit(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise WeightsError for a tensor of another shape, or of a type that cannot be rounded to the one wanted."""
    if tuple(shape) != tuple(tensor.shape):
        raise WeightsError(f"weight {name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
    # between float types a copy rounds as it should; into others it would cut
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
        raise WeightsError(f"weight {name}: expected {dtype}, got {tensor.dtype}")


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinity."""
    names, ends = extremes(tensors)
    # one wait for the device, not one a tensor
    return [name for name, good in zip(names, ends.isfinite().all(1).tolist(), strict=True) if not good]


def extremes(tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[str], Float[Tensor, "n 2"]]:
    """Return the names of those that hold floats, and the least and the largest of each, NaN where it has one."""
    floats = [(name, one.detach()) for name, one in tensors if one.is_floating_point() and one.numel()]
    ends = [end for _, one in floats for end in torch.aminmax(one)]
    return [name for name, _ in floats], torch.stack(ends or [torch.zeros(0)]).view(-1, 2)


def describe_not_finite(names: Sequence[str]) -> str:
    """Words for an error: which tensors, of those that `not_finite` returned."""
    others = f" and {len(names) - 1} other tensors hold" if len(names) > 1 else " holds"
    return f"expected finite numbers, but '{names[0]}'{others} NaN or infinity"


def model_checksum(model: CausalLM, *, like: str = "") -> str:
    """Return the checksum that `pack_weights` would put into the manifest, of the kind of `like`."""
    return checksum_of((tensor for _, tensor in tensors_of(model)), like=like)


def checksum_of(tensors: Iterable[Tensor], *, like: str = "") -> str:
    """Return the checksum that a `WeightPacker` would put into the manifest, of the kind of `like`."""
    whole = Digest(kind_of(like))
    for tensor in tensors:
        whole.add(tensor)
    return whole.text()


def tensors_of(model: Any) -> Iterable[tuple[str, Tensor]]:
    """The `unique_tensors` of a module, or what weights that are still in files give one by one."""
    return unique_tensors(model) if isinstance(model, torch.nn.Module) else model.tensors()


def unique_tensors(model: Any) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a module in name order, each storage once."""
    seen: set[int] = set()
    unique = []
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        # shards have no storage that tells which are tied
        where = id(tensor) if tensor.is_meta or hasattr(tensor, "full_tensor") else tensor.data_ptr()
        if where in seen and tensor.numel():
            continue
        seen.add(where)
        unique.append((name, tensor.detach()))
    return unique


def _dtype(name: str) -> torch.dtype:
    return torch.empty(0, dtype=torch.__dict__[name]).dtype
