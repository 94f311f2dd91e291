"""A checksum says its kind, is the same on every device and in every chunk, and tells any change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from rlhfspec.core.errors import NotFiniteError
from rlhfspec.core.weight_records import DigestKind, kind_of, pieces_of
from rlhfspec.engine.weights.chunks import (
    WeightPacker,
    buckets_of,
    checksum_of,
    weight_views,
)
from rlhfspec.engine.weights.digests import Digest, read_once, word_sums
from tests.helpers.devices import DEVICES

WORD = (1 << 64) - 1


def by_the_book(data: bytes) -> list[int]:
    """The two sums of splitmix64's mixed words, in Python's integers."""
    data += bytes(-len(data) % 8)
    first = second = 0
    for place in range(len(data) // 8):
        x = ((place + 1) * 0x9E3779B97F4A7C15 & WORD) ^ int.from_bytes(
            data[8 * place : 8 * place + 8], "little"
        )
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
        x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
        first += x
        second += x ^ ((x ^ x >> 31) * 0x9E3779B97F4A7C15 & WORD)
    return [first & WORD, second & WORD]


def tensors() -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    return [
        ("a", torch.randn(33, 7)),
        ("b", torch.randn(5).bfloat16()),
        ("c", torch.arange(3, dtype=torch.uint8)),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_the_sums_are_those_of_the_book_on_every_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("rlhfspec.engine.weights.digests._PIECE_WORDS", 10)
    for _, tensor in tensors():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        sums = word_sums(tensor.to(device)).cpu().numpy().view(np.uint64)
        assert sums.tolist() == by_the_book(raw)


def test_it_tells_a_bit_a_place_and_a_size() -> None:
    plain = torch.randn(64)
    bit = plain.clone()
    bit.view(torch.int32)[9] ^= 1
    moved = plain.clone()
    moved[[2, 3]] = moved[[3, 2]]
    swapped_words = plain.view(32, 2)[[1, 0, *range(2, 32)]].reshape(-1)
    others = [bit, moved, swapped_words, plain[:63], torch.cat([plain, torch.zeros(2)]), plain.bfloat16()]
    sums = {checksum_of([one], like="words:") for one in (plain, *others)}
    assert len(sums) == 7
    assert checksum_of([plain[:2], plain[2:]], like="words:") not in sums


def test_a_checksum_names_its_kind_and_xxh3_is_of_the_bytes() -> None:
    raw = b"".join(
        t.reshape(-1).view(torch.uint8).numpy().tobytes().ljust(-(-t.nbytes // 16) * 16, b"\0")
        for _, t in tensors()
    )
    plain = checksum_of(t for _, t in tensors())
    assert plain == xxhash.xxh3_128_hexdigest(raw) and kind_of(plain) == "xxh3"
    words = checksum_of((t for _, t in tensors()), like="words:")
    assert kind_of(words) == "words" and len(words) == len("words:") + 32
    assert Digest("words").text() != Digest("xxh3").text()


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_words_are_of_the_tensors_whatever_the_chunks(device: torch.device | None, chunk_bytes: int) -> None:
    whole = checksum_of((t for _, t in tensors()), like="words:")
    packer = WeightPacker(
        name="target",
        weight_version=1,
        hf_config_json="{}",
        chunk_bytes=chunk_bytes,
        device=device,
        kind="words",
    )
    chunks = [chunk.copy() for chunk in packer.chunks(tensors())]
    manifest = packer.manifest()
    assert manifest.checksum == whole
    assert {kind_of(told) for told in manifest.chunk_checksums} == {"xxh3"}, "what comes to the host"
    views = weight_views(manifest, chunks)
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors())
    again = manifest.in_chunks_of(chunk_bytes)
    is_cut = len(again.chunk_num_bytes) > len(manifest.chunk_num_bytes)
    assert is_cut or again.chunk_num_bytes == manifest.chunk_num_bytes
    assert is_cut == (chunk_bytes == 64) and again.describes_what(manifest)
    packer = WeightPacker(hf_config_json="{}", name="target", weight_version=1, kind="words")
    one, _ = packer.pack(tensors())
    assert one.describes_what(manifest)


def test_a_bucket_that_stays_on_its_device_has_the_words_of_its_tensors() -> None:
    packer = WeightPacker(
        name="target",
        weight_version=1,
        hf_config_json="{}",
        chunk_bytes=16,
        rooms=[torch.empty(1024, dtype=torch.uint8) for _ in range(2)],
        device=torch.device("cpu"),
        kind="words",
    )
    buckets = [bucket.clone() for bucket in packer.buckets(tensors())]
    assert all(len(bucket) % 16 == 0 for bucket in buckets) and len(buckets) == 3
    assert packer.sums().tolist() == [word_sums(tensor).tolist() for _, tensor in tensors()]
    assert packer.manifest().checksum == checksum_of((t for _, t in tensors()), like="words:")


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named_before_anything_is_compared(odd: float) -> None:
    largest = torch.full((64,), 3e38)
    cut = torch.ones(100, 5).bfloat16()
    cut[99, 3] = odd
    given = [("fine", largest), ("none", torch.zeros(0)), ("odd", cut), ("odd too", torch.tensor([odd]))]
    packer = WeightPacker(
        name="target", weight_version=7, hf_config_json="{}", chunk_bytes=256, cuts=True, kind="words"
    )
    assert len(list(packer.buckets(given))) > 4, "it is in the last piece"
    with pytest.raises(
        NotFiniteError, match=r"version 7 are not published: .*'odd' and 1 other tensors hold"
    ):
        packer.sums()


@pytest.mark.parametrize(
    ("shape", "row_bytes", "most"), [((1000, 8), 16, 256), ((1000, 7), 14, 256), ((9, 3), 12, 40)]
)
def test_a_large_tensor_is_cut_by_rows_at_aligned_places(
    shape: tuple[int, ...], row_bytes: int, most: int
) -> None:
    whole = shape[0] * row_bytes
    pieces = pieces_of(shape, whole, most)
    assert sum(pieces) == whole and all(size % row_bytes == 0 for size in pieces)
    assert all(size % 16 == 0 for size in pieces[:-1])
    # rows that end at an aligned place stay together
    assert max(pieces) <= max(most, 16 * row_bytes) and len(pieces) > 1
    assert pieces_of(shape, whole, whole) == [whole] and pieces_of((), 4, 1) == [4]


@pytest.mark.parametrize("kind", ["words", "xxh3"])
def test_cut_tensors_have_the_checksum_that_whole_ones_have_and_come_together_again(kind: DigestKind) -> None:
    torch.manual_seed(1)
    given = [("a", torch.randn(3, 2)), ("aa", torch.randn(100, 5).bfloat16()), *tensors()[1:]]
    given += [("d", torch.randn(40, 4)), ("e", torch.ones(2))]
    settings = {"name": "target", "weight_version": 1, "hf_config_json": "{}", "kind": kind}
    whole, _ = WeightPacker(**settings).pack(given)
    layout = whole.in_chunks_of(256)
    assert len(layout.chunk_num_bytes) > len(whole.chunk_num_bytes) and max(layout.chunk_num_bytes) <= 256

    packer = WeightPacker(**settings, chunk_bytes=256, cuts=True, rooms=1)
    buckets = buckets_of(layout)
    room = torch.empty(max(one.begins_at + one.num_bytes for one in buckets), dtype=torch.uint8)
    assert len(room) <= max(256, max(tensor.nbytes for _, tensor in given) + 15)
    found, again = {}, Digest(kind)
    for bucket, sent in zip(buckets, packer.buckets(given), strict=True):
        assert len(sent) == bucket.num_bytes
        flat = room[bucket.begins_at :][: bucket.num_bytes]
        flat.copy_(sent)
        views = bucket.views(room)
        if kind == "words":
            for piece in [flat[: bucket.piece_bytes]] if bucket.piece_bytes else [*views.values()]:
                again.add(piece, bucket.begins_at)
        else:
            read_once(flat.numpy(), (), again)
        found |= {name: view.clone() for name, view in views.items()}
    assert [*found] == [name for name, _ in given]
    assert all(torch.equal(found[name], tensor) for name, tensor in given)
    sums, _ = again.read(torch.zeros(0))
    assert sums.tolist() == packer.sums().tolist()
    pieces = [1 if kind == "xxh3" or one.piece_bytes else len(one.ends) for one in buckets]
    assert len(sums) == sum(pieces)
    assert again.text() == packer.manifest().checksum == whole.checksum
    assert packer.manifest().chunk_num_bytes == layout.chunk_num_bytes
    assert packer.manifest().describes_what(whole)
