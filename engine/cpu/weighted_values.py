"""Means of cached values: of each element one chain of fused multiply-adds over the positions, in order.

One row's chains are too few to keep a processor busy, so several rows are summed abreast, and each value is loaded
once for all of them. That is done for the positions that hold a value for every row; behind them each row goes alone,
because what a masked cell holds need not be a number.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from rlhfspec.engine.cpu.part import Part
from rlhfspec.engine.cpu.writer import FLOAT, INTEGER, WIDTH

VECTORS_TOGETHER = 4
"Of a head: their means are summed at a time, and the sums of at least two rows stay in registers."
MOST_ROWS = 8
"Whose means are summed abreast."
REGISTERS = {8: 16, 16: 32}
"Vectors that a processor holds, by their width."


def write_means(part: Part, totals: Any, values: Any, view: Any, *, width: int) -> None:
    """Sums of weighted values over sums of weights, of all rows; `totals` is room for a float of each."""
    w = part.w
    held = w.ir.select(part.is_chain, w.ir.add(part.segment["start"], part.begin), part.segment["base"])
    together = VECTORS_TOGETHER * width
    for begin in range(0, part.size, together):
        count = min(part.size - begin, together)
        with w.ir.if_else(w.ir.icmp_signed(">", held, INTEGER(0))) as (some, none):
            with some:
                _sum_abreast(part, totals, values, held, begin, count, width)
            with none:
                _clear(part, totals, begin, count)
        with w.loop(part.rows) as row:
            _finish(part, totals, values, held, view, begin, count, row.index)


def _clear(part: Part, totals: Any, begin: int, count: int) -> None:
    w = part.w
    with w.loop(part.rows) as row:
        w.store(FLOAT(0.0), totals, row.index)
        for start in range(begin, begin + count, WIDTH):
            w.store(w.splat(0.0), part.out(row.index), INTEGER(start))


def _sum_abreast(part: Part, totals: Any, values: Any, held: Any, begin: int, count: int, width: int) -> None:
    """Sum the first `held` positions of all rows: as many abreast as registers allow, then the rest."""
    w = part.w
    lanes = width if count % width == 0 else WIDTH
    done, left = INTEGER(0), part.rows
    abreast = _rows_abreast(count // lanes, width)
    while abreast:
        whole = w.times(w.ir.udiv(left, INTEGER(abreast)), abreast)
        with w.if_any(whole), w.loop(whole, step=abreast) as group:
            first = w.ir.add(done, group.index)
            rows = [w.ir.add(first, INTEGER(lane)) for lane in range(abreast)]
            _sum_rows(part, totals, values, held, rows, range(begin, begin + count, lanes))
        done, left = w.ir.add(done, whole), w.ir.sub(left, whole)
        abreast //= 2


def _rows_abreast(vectors: int, width: int) -> int:
    """Rows, a power of two, whose sums, weights and totals the registers hold, and a value."""
    abreast = MOST_ROWS
    while abreast > 1 and abreast * (vectors + 2) + 1 > REGISTERS[width]:
        abreast //= 2
    return abreast


def _sum_rows(part: Part, totals: Any, values: Any, held: Any, rows: list[Any], starts: range) -> None:
    """One loop over the positions for these rows; `starts` are the first elements of each vector."""
    w, lanes, many = part.w, starts.step, len(rows)
    kind, weights = ir.VectorType(FLOAT, lanes), [part.weights(row) for row in rows]
    zeros = [FLOAT(0.0)] * many + [w.splat(0.0, lanes)] * (many * len(starts))
    with w.loop(held, start=zeros) as each:
        here = w.address(values, w.times(each.index, part.size))
        single = [w.load(row, each.index, FLOAT) for row in weights]
        splat = [w.splat(weight, lanes) for weight in single]
        earlier = iter(each.values)
        sums = [w.ir.fadd(next(earlier), weight) for weight in single]
        for start in starts:
            value = w.load(here, INTEGER(start), kind)
            sums += [w.fma(value, weight, next(earlier)) for weight in splat]
        each.values = sums
    found = iter(each.values)
    for row in rows:
        w.store(next(found), totals, row)
    outs = [part.out(row) for row in rows]
    for start in starts:
        for out in outs:
            w.store(next(found), out, INTEGER(start))


def _finish(
    part: Part, totals: Any, values: Any, held: Any, view: Any, begin: int, count: int, row: Any
) -> None:
    """Add the positions behind `held` to one row's sums, and divide."""
    w = part.w
    out, starts, zeros = part.out(row), range(begin, begin + count, WIDTH), w.zeros(part.size)
    weights = w.address(part.weights(row), held)
    values = w.address(values, w.times(held, part.size))
    sums = [w.load(totals, row, FLOAT), *(w.load(out, INTEGER(start)) for start in starts)]
    with w.loop(w.ir.sub(view, held), start=sums) as each:
        weight = w.load(weights, each.index, FLOAT)
        unseen = w.ir.fcmp_ordered("==", weight, FLOAT(0.0))
        value = w.ir.select(unseen, zeros, w.address(values, w.times(each.index, part.size)))
        total, *sums = each.values
        each.values = [w.ir.fadd(total, weight)] + [
            w.fma(w.load(value, INTEGER(start)), w.splat(weight), x)
            for start, x in zip(starts, sums, strict=True)
        ]
    total, *sums = each.values
    for start, x in zip(starts, sums, strict=True):
        w.store(w.ir.fdiv(x, w.splat(total)), out, INTEGER(start))
