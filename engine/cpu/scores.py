"""Scores of queries with cached keys: eight chains of fused multiply-adds over the head, added in one order.

Eight positions are scored at a time. A vector of sixteen floats holds eight chains of two rows; the keys, which both
need, are loaded into both of its halves.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from rlhfspec.engine.cpu.part import Part
from rlhfspec.engine.cpu.writer import FLOAT, INTEGER, WIDTH, Writer


def pack_queries(part: Part, packed: Any, *, abreast: int) -> None:
    """Lay the queries of `abreast` rows side by side, eight elements of each; the last row may stand twice."""
    w = part.w
    with w.loop(part.rows, step=abreast) as group:
        target = w.address(packed, w.times(group.index, part.size))
        for lane in range(abreast):
            source = part.query(_row(w, part, group.index, lane))
            for start in range(0, part.size, WIDTH):
                place = INTEGER(start * abreast + lane * WIDTH)
                w.store(w.load(source, INTEGER(start)), target, place)


def write_scores(part: Part, packed: Any, keys: Any, view: Any, *, abreast: int) -> None:
    """Every row's dot products with the first `view` keys, times the scale."""
    w, size = part.w, part.size
    lanes = abreast * WIDTH
    kind, scale = ir.VectorType(FLOAT, lanes), w.splat(w.at["scale"], lanes)
    twice = [lane % WIDTH for lane in range(lanes)]
    with w.loop(view, step=WIDTH) as eight:
        here = w.address(keys, w.times(eight.index, size))
        with w.loop(part.rows, step=abreast) as group:
            q = w.address(packed, w.times(group.index, size))
            sums = [w.splat(0.0, lanes) for _ in range(WIDTH)]
            for start in range(0, size, WIDTH):
                element = w.load(q, INTEGER(start * abreast), kind)
                for c in range(WIDTH):
                    key = w.load(here, INTEGER(c * size + start))
                    sums[c] = w.fma(w.shuffle(key, key, twice), element, sums[c])
            scores = w.ir.fmul(w.sum_of_each(sums), scale)
            for lane in range(abreast):
                own = w.shuffle(scores, scores, range(lane * WIDTH, (lane + 1) * WIDTH))
                w.store(own, part.weights(_row(w, part, group.index, lane)), eight.index)


def _row(w: Writer, part: Part, first: Any, lane: int) -> Any:
    """The row in this place of a group; the part's last one, where there is none."""
    row, last = w.ir.add(first, INTEGER(lane)), w.ir.sub(part.rows, INTEGER(1))
    return w.ir.select(w.ir.icmp_signed("<", row, last), row, last) if lane else first
