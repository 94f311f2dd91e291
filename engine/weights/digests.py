"""Checksums of weights: XXH3 of bytes on the host, or sums of mixed words where the bytes lie on a GPU.

A checksum names its kind: 32 hex digits are XXH3 of 128 bits over the bytes in their order, `words:` and 32 hex digits
XXH3 over every tensor's two word sums. The sums are of 64-bit integers that wrap around, so neither the order of
additions nor the device changes a bit, and a GPU computes them at the speed of its memory; nothing but the sums comes
to the host. Both tell damage on the way, and are no defence against forgery.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

import numpy as np
import torch
import xxhash
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from ...core.weight_records import ALIGNMENT_BYTES, WORDS, DigestKind
from ..triton_here import can_run_triton

_PIECE_BYTES = 1 << 19
"So many bytes at once: those that are read stay in a core's cache until all is done with them."
_PIECE_WORDS = 4 << 20
"So many words at once: what is computed on the way takes a few times 32 MiB."
# odd constants of splitmix64, as signed 64-bit integers
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_AGAIN = 0x94D049BB133111EB - (1 << 64)


def read_once(
    data: np.ndarray, dtypes: Collection[torch.dtype], whole: Digest | None = None
) -> tuple[str, bool]:
    """Read bytes of the host once, for all that is asked of them.

    Args:
        data: uint8 [n].
        dtypes: of the tensors in it, without what pads them.
        whole: takes the bytes too; of kind `xxh3`.

    Returns:
        Their XXH3, and whether all numbers are known to be finite: False where types are mixed, or bytes are missing.
    """
    own, ends = xxhash.xxh3_128(), []
    numbers = None
    if len(dtypes) == 1 and (dtype := next(iter(dtypes))).is_floating_point:
        # a damaged chunk may be of any length; its checksum says so
        numbers = read_only(data).view(dtype) if len(data) and not len(data) % dtype.itemsize else None
    for at in range(0, len(data), _PIECE_BYTES):
        piece = data[at : at + _PIECE_BYTES]
        own.update(piece.data)
        if whole is not None:
            whole.add_bytes(piece)
        if numbers is not None:
            size = numbers.element_size()
            part = numbers[at // size : (at + len(piece)) // size]
            # a sum, which may be infinite of finite numbers, costs half of it in float32, thirty times it in bfloat16
            ends += [part.sum()] if part.dtype == torch.float32 else torch.aminmax(part)
    if whole is not None:
        whole.note(own.digest())
    return own.hexdigest(), numbers is not None and bool(torch.stack(ends).isfinite().all())


def read_only(data: np.ndarray) -> Tensor:
    """The same bytes as a tensor, which nobody may write to."""
    with warnings.catch_warnings():
        # chunks of an object store are read-only
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)


def digest(data: np.ndarray) -> str:
    """The XXH3 of bytes on the host."""
    return xxhash.xxh3_128_hexdigest(data.data)


class Digest:
    """Takes tensors one after the other; `text` is their checksum."""

    def __init__(self, kind: DigestKind) -> None:
        self._kind = kind
        self._bytes = xxhash.xxh3_128()
        self._sums: list[Tensor] = []
        self._tensor_of: list[int] = []
        "the number of the tensor that each of the sums is of, or of a piece of"
        self._sizes: list[int] = []
        self._read: np.ndarray | None = None

    def add(self, tensor: Tensor, at: int = 0) -> None:
        """Take a tensor of any type, or a piece that begins at byte `at` of one; with `words` no wait for its device.

        A piece that others follow has a multiple of `ALIGNMENT_BYTES`.
        """
        if self._kind == "words":
            if not at:
                self._sizes.append(0)
            self._sizes[-1] += tensor.nbytes
            self._tensor_of.append(len(self._sizes) - 1)
            self._sums.append(word_sums(tensor, at // 8))
            return
        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._bytes.update(raw.data)
        self._bytes.update(bytes(-len(raw) % ALIGNMENT_BYTES))

    def add_bytes(self, padded: np.ndarray) -> None:
        """Take bytes of the host that are whole tensors, each padded to `ALIGNMENT_BYTES`; of `xxh3` alone."""
        self._bytes.update(padded.data)

    def note(self, digest: bytes) -> None:
        """Note the XXH3 of a bucket whose bytes were taken."""
        self._sums.append(torch.tensor(np.frombuffer(digest, dtype="<i8")))

    def read(self, beside: Tensor) -> tuple[Int[np.ndarray, "n 2"], np.ndarray]:
        """Bring to the host, in one wait: each tensor's or piece's word sums, else each bucket's XXH3, and integers."""
        sums = torch.stack(self._sums) if self._sums else torch.zeros(0, 2, dtype=torch.int64)
        beside = beside.to(sums.device, torch.int64, non_blocking=True)
        found = torch.cat([sums.reshape(-1), beside.reshape(-1)]).cpu().numpy()
        self._read = found[: sums.numel()].reshape(-1, 2)
        return self._read, found[sums.numel() :].reshape(beside.shape)

    def text(self) -> str:
        """The checksum with its kind; of `words`, waits for the device unless the sums were read."""
        if self._kind == "xxh3":
            return self._bytes.hexdigest()
        sums = self.read(torch.zeros(0))[0] if self._read is None else self._read
        table = np.zeros((len(self._sizes), 3), dtype="<i8")
        table[:, 2] = self._sizes
        # sums of pieces add up
        np.add.at(table[:, :2], np.array(self._tensor_of, dtype=np.int64), sums)
        return WORDS + digest(table.reshape(-1).view(np.uint8))


def word_sums(tensor: Tensor, first: int = 0) -> Int[Tensor, " 2"]:
    """Return two sums over a tensor's 64-bit words, each mixed with its place, on the tensor's device.

    Those of its pieces, each with the place of its `first` word, add up to the whole's.
    The mixing is splitmix64's (Steele, Lea and Flood, 2014): one bit of a word changes half of what is added.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if missing := -flat.numel() % 8:
        flat = F.pad(flat, (0, missing))
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    if can_run_triton(words.device):
        from .word_sums_cuda import add_word_sums

        add_word_sums(words, sums, first)
        return sums
    for at in range(0, len(words), _PIECE_WORDS):
        piece = words[at : at + _PIECE_WORDS]
        places = torch.arange(
            first + at + 1, first + at + 1 + len(piece), dtype=torch.int64, device=piece.device
        )
        mixed = places.mul_(_GOLDEN).bitwise_xor_(piece)
        mixed = _shifted_xor(mixed, 30).mul_(_MIX)
        mixed = _shifted_xor(mixed, 27).mul_(_MIX_AGAIN)
        sums[0] += mixed.sum()
        sums[1] += _shifted_xor(mixed, 31).mul_(_GOLDEN).bitwise_xor_(mixed).sum()
    return sums


def _shifted_xor(words: Tensor, bits: int) -> Tensor:
    """Return x ^ (x >> bits) of unsigned words, in a new tensor: the mask takes out the signs that torch shifts in."""
    return words.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(words)


class HostMirror:
    """One buffer, pinned for a GPU's buckets, that is written over and over."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def of(self, bucket: Tensor) -> np.ndarray:
        """Return a bucket's bytes, uint8 [n], once they are here; valid until the next call.

        A bucket of the host is copied too: whoever has none on a device does without a mirror.
        """
        on_gpu = bucket.device.type == "cuda"
        if len(self._room) < len(bucket):
            self._room = torch.empty(len(bucket), dtype=torch.uint8, pin_memory=on_gpu)
        here = self._room[: len(bucket)]
        here.copy_(bucket, non_blocking=on_gpu)
        if on_gpu:
            # only what packs and copies: transfers of earlier buckets have a stream of their own
            torch.cuda.current_stream(bucket.device).synchronize()
        return here.numpy()
