"""Runs every operation of the CPU back end on random shapes in guarded buffers, against its formula in numpy.

`python -m tests.helpers.guarded_operations SEED` prints the operations it ran: in a process of its own, since one
that touches a byte beside its buffers ends there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from rlhfspec.engine.cache.segments import SEGMENT_FIELDS
from rlhfspec.engine.cpu.pool_attention import block_tokens
from rlhfspec.engine.cpu.products import PANEL, product_name
from rlhfspec.engine.cpu.program import OPERATIONS, native_code
from rlhfspec.engine.cpu.sampling import MOST_LEADERS, leaders_name
from rlhfspec.engine.cpu.weight_panels import DIFFER_BYTES, panels_name
from rlhfspec.engine.decoding.noise import gumbel_from_bits
from rlhfspec.engine.parts import PARTS
from tests.helpers.guarded import guarded

HEAD_SIZES = (8, 24, 64)


class Case:
    """One call's random numbers and buffers."""

    def __init__(self, seed: int, at_end: bool) -> None:
        self.random = np.random.default_rng(seed)
        self._at_end = at_end
        self._kept: list[np.ndarray] = []

    def size(self, most: int, step: int = 1) -> int:
        return step * int(self.random.integers(1, most + 1))

    def floats(self, *shape: int) -> np.ndarray:
        return self.guard(self.random.normal(size=shape).astype(np.float32))

    def guard(self, values: np.ndarray) -> np.ndarray:
        self._kept.append(guarded(values, at_end=self._at_end))
        return self._kept[-1]


def close(got: np.ndarray, expected: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5, err_msg=name)


def at(array: np.ndarray) -> int:
    return array.ctypes.data


def norms(case: Case, call: Callable[..., None], *, gained: bool) -> None:
    groups, lanes, size = case.size(5), case.size(3), case.size(6, 8)
    x, out = case.floats(groups, lanes, size), case.floats(groups, lanes, size)
    gains = case.floats(lanes, size)
    call(
        out=at(out),
        x=at(x),
        gains=at(gains) if gained else 0,
        groups=groups,
        lanes=lanes,
        size=size,
        group_stride=lanes * size,
        lane_stride=size,
        floor=0.1,
    )
    expected = x / np.sqrt((x.astype(float) ** 2).sum(-1, keepdims=True) + 0.1)
    close(out, expected * gains if gained else expected, "norms")


def rotate(case: Case, call: Callable[..., None]) -> None:
    tokens, heads, turned, size = case.size(4), case.size(3), case.size(3), case.size(4, 8)
    x, rope = case.floats(tokens, heads, turned + 1, size), case.floats(tokens, size)
    pairs, turn = x.view(np.complex64).copy(), rope.view(np.complex64)
    pairs[:, :, :turned] *= turn[:, None, None]
    call(x=at(x), rope=at(rope), tokens=tokens, heads=heads, turned=turned, lanes=turned + 1, size=size)
    close(x, pairs.view(np.float32), "rotate")


def gate(case: Case, call: Callable[..., None]) -> None:
    rows, size = case.size(5), case.size(6, 8)
    both, out = case.floats(rows, 2 * size), case.floats(rows, size)
    call(out=at(out), both=at(both), rows=rows, size=size)
    gates = both[:, :size].astype(float)
    close(out, gates / (1 + np.exp(-gates)) * both[:, size:], "gate")


def embed(case: Case, call: Callable[..., None], *, bfloat16: bool) -> None:
    rows, size, vocabulary, stride = case.size(5), case.size(4, 8), case.size(9), case.size(3)
    words = torch.randn(vocabulary, size, generator=torch.Generator().manual_seed(rows))
    table = words.bfloat16().view(torch.int16).numpy() if bfloat16 else words.numpy()
    ids = case.guard(case.random.integers(0, vocabulary, ((rows - 1) * stride + 1)))
    held, out = case.guard(table), case.floats(rows, size)
    call(out=at(out), ids=at(ids), table=at(held), rows=rows, id_stride=stride, size=size)
    close(out, (words.bfloat16().float() if bfloat16 else words).numpy()[ids[::stride]], "embed")


def segments(case: Case, count: int) -> np.ndarray:
    return np.zeros((count, len(SEGMENT_FIELDS)), dtype=np.int64)


def turn(case: Case, call: Callable[..., None]) -> None:
    num, size, positions = case.size(4), case.size(4, 8), case.size(20)
    table, out = case.floats(positions, size), case.floats(num, size)
    spans = segments(case, num)
    spans[:, 3] = case.random.integers(0, positions, num)
    held = case.guard(spans)
    call(out=at(out), segments=at(held), table=at(table), num=num, size=size)
    close(out, table[spans[:, 3]], "turn")


def advance(case: Case, call: Callable[..., None]) -> None:
    spans = segments(case, case.size(5))
    held = case.guard(spans)
    call(segments=at(held), num=len(spans))
    spans[:, 3] += 1
    assert np.array_equal(held, spans)


def product(case: Case, call: Callable[..., None], *, added: bool, bfloat16: bool) -> None:
    rows, depth, panels = case.size(40), case.size(70), case.size(5)
    weight = torch.from_numpy(case.random.normal(size=(panels, depth, PANEL)).astype(np.float32))
    weight = weight.bfloat16() if bfloat16 else weight
    held = case.guard(weight.view(torch.int16).numpy() if bfloat16 else weight.numpy())
    x, out = case.floats(rows, depth), case.floats(rows, panels * PANEL)
    more = case.floats(rows, panels * PANEL)
    cuts = case.random.choice(np.arange(1, depth + 1), size=min(depth, case.size(PARTS)), replace=False)
    ends = case.guard(np.unique([*np.sort(cuts)[:-1], depth]))
    call(
        out=at(out),
        x=at(x),
        weights=at(held),
        added=at(more) if added else 0,
        ends=at(ends),
        parts=len(ends),
        rows=rows,
        depth=depth,
        panels=panels,
        out_stride=panels * PANEL,
        x_stride=depth,
        added_stride=panels * PANEL if added else 0,
    )
    columns = weight.double().numpy().transpose(1, 0, 2).reshape(depth, -1)
    expected = x.astype(float) @ columns + (more if added else 0.0)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-4, err_msg="product")


def panels(
    case: Case, call: Callable[..., None], *, compares: bool, gained: bool = False, bfloat16: bool = False
) -> None:
    """Rows of weights, each where it lies, to panels [num, depth, PANEL]; or whether panels hold them."""
    num, depth = case.size(3), case.size(37)
    if bfloat16:
        rows = [
            case.guard(case.random.integers(-999, 999, depth).astype(np.int16)) for _ in range(num * PANEL)
        ]
    else:
        rows = [case.floats(depth) for _ in range(num * PANEL)]
    gains = case.floats(depth)
    whole = np.stack(rows) * gains if gained else np.stack(rows)
    expected = np.ascontiguousarray(whole.reshape(num, PANEL, depth).transpose(0, 2, 1))
    addresses = case.guard(np.array([at(row) for row in rows], np.int64))
    differ = case.guard(np.zeros(DIFFER_BYTES, np.uint8))
    made = case.guard(expected if compares else np.zeros_like(expected))
    call(panels=at(made), rows=at(addresses), gains=at(gains), differ=at(differ), num=num, depth=depth)
    assert np.array_equal(made, expected) and not differ.any()
    if compares:
        made[-1, -1, -1] += 1
        call(panels=at(made), rows=at(addresses), gains=at(gains), differ=at(differ), num=num, depth=depth)
        assert differ.any()


def gumbel(case: Case, call: Callable[..., None]) -> None:
    rows, vocabulary = case.size(4), 7 + case.size(40)
    ids, first, second = (
        case.guard(case.random.integers(-(2**31), 2**31, n, dtype=np.int32)) for n in (vocabulary, rows, rows)
    )
    out = case.floats(rows, vocabulary)
    call(out=at(out), ids=at(ids), first=at(first), second=at(second), rows=rows, vocabulary=vocabulary)
    bits = mixed(
        mixed(ids.view(np.uint32) + first.view(np.uint32)[:, None]) ^ second.view(np.uint32)[:, None]
    )
    expected = gumbel_from_bits(torch.from_numpy(bits.view(np.int32))).numpy()
    np.testing.assert_allclose(out, expected, rtol=3e-7, atol=1e-6)


def mixed(x: np.ndarray) -> np.ndarray:
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def leaders(case: Case, call: Callable[..., None], *, count: int) -> None:
    samples, nodes, vocabulary, depth = case.size(3), case.size(3), 7 + case.size(40), case.size(3)
    logits, noise = case.floats(samples, nodes, vocabulary), case.floats(samples, depth, vocabulary)
    levels = case.guard(case.random.integers(0, depth, (samples, nodes)))
    divisors = case.guard(case.random.uniform(0.5, 2, samples).astype(np.float32))
    factors = case.guard(case.random.integers(0, 2, samples).astype(np.float32))
    best, logprobs = case.floats(samples, nodes, count), case.floats(samples, nodes, count)
    ids = case.guard(np.zeros((samples, nodes, count), dtype=np.int64))
    call(
        best=at(best),
        ids=at(ids),
        logprobs=at(logprobs),
        logits=at(logits),
        noise=at(noise),
        levels=at(levels),
        divisors=at(divisors),
        factors=at(factors),
        samples=samples,
        nodes=nodes,
        vocabulary=vocabulary,
        sample_stride=nodes * vocabulary,
        node_stride=vocabulary,
        noise_stride=depth * vocabulary,
        level_stride=vocabulary,
        share=1.0,
    )
    mine = np.take_along_axis(noise, levels[..., None], axis=1)
    scores = logits / divisors[:, None, None] + factors[:, None, None] * mine
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    assert np.array_equal(ids, order)
    close(best, np.take_along_axis(scores, order, -1), "leaders")
    if count > 1:
        everything = scores.astype(float) - np.log(np.exp(scores.astype(float)).sum(-1, keepdims=True))
        close(logprobs, np.take_along_axis(everything, order, -1), "log-probabilities")


def store_and_attend(case: Case, size: int) -> None:
    """Chains in some slots, their last position the last of the slot."""
    operations = native_code(size).operations
    slots, heads, queries, capacity = case.size(3), case.size(3), case.size(3), case.size(5, 8)
    lanes = queries + 2
    spans = segments(case, slots)
    counts = case.random.integers(1, min(capacity, 20) + 1, slots)
    spans[:, 0] = case.random.permutation(slots)
    spans[1:, 1] = np.cumsum(counts)[:-1]
    spans[:, 2], spans[:, 3] = counts, capacity - counts
    tokens, block = int(counts.sum()), block_tokens(queries)
    held = case.guard(spans)
    # other ranks' heads lie beside
    others = case.size(3) - 1
    slot_heads, begin = heads + others, int(case.random.integers(0, others + 1))
    whole = case.floats(2, slots, slot_heads, capacity, size)
    cells = whole[:, :, begin : begin + heads]
    qkv, out = case.floats(tokens, heads, lanes, size), case.floats(tokens, heads, queries, size)
    weights = case.floats(block * queries, capacity)
    common = {"cells": at(whole) + 4 * begin * capacity * size, "qkv": at(qkv), "segments": at(held)}
    common |= {"num": slots, "slots": slots, "slot_heads": slot_heads}
    operations["store"](**common, heads=heads, lanes=lanes, capacity=capacity)
    operations["attend"](
        **common,
        out=at(out),
        weights=at(weights),
        heads=heads,
        queries=queries,
        capacity=capacity,
        block=block,
        window=0,
        scale=0.3 * np.log2(np.e),
        cap=0.0,
    )
    for slot, first, count, start in spans[:, :4]:
        for token in range(count):
            mine, position = qkv[first + token], start + token
            assert np.array_equal(cells[:, slot, :, position], mine[:, queries:].transpose(1, 0, 2))
            keys, values = cells[:, slot, :, : position + 1].astype(float)
            scores = np.einsum("hqe,hte->hqt", mine[:, :queries].astype(float), keys) * 0.3
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            close(out[first + token], np.einsum("hqt,hte->hqe", shares, values), "attend")


CHECKS: dict[str, Callable[[Case, Callable[..., None]], None]] = {
    "norms": partial(norms, gained=False),
    "norms_gained": partial(norms, gained=True),
    "rotate": rotate,
    "gate": gate,
    "embed": partial(embed, bfloat16=False),
    "embed_bfloat16": partial(embed, bfloat16=True),
    "turn": turn,
    "advance": advance,
    "gumbel": gumbel,
    **{
        product_name(added=a, bfloat16=b): partial(product, added=a, bfloat16=b)
        for a in (False, True)
        for b in (False, True)
    },
    **{
        panels_name(compares=compares, gained=gained, bfloat16=bfloat16): partial(
            panels, compares=compares, gained=gained, bfloat16=bfloat16
        )
        for compares in (False, True)
        for gained, bfloat16 in ((False, False), (True, False), (False, True))
    },
    **{leaders_name(count): partial(leaders, count=count) for count in range(1, MOST_LEADERS + 1)},
}


def main(seed: int, rounds: int = 20) -> None:
    """Run them all."""
    ran = set()
    for round_ in range(rounds):
        for at_end in (True, False):
            for index, (name, check) in enumerate(CHECKS.items()):
                check(Case(hash((seed, round_, index)) & 0xFFFF, at_end), native_code(8).operations[name])
                ran.add(name)
            for size in HEAD_SIZES:
                store_and_attend(Case(seed + round_ * 100 + size, at_end), size)
                ran |= {"store", "attend"}
    missing = OPERATIONS.keys() - ran
    print("ran", len(ran), "missing", *sorted(missing))


if __name__ == "__main__":
    main(int(sys.argv[1]))
