"""Attention over cached tokens, written for one head size: keys and values stored, scores, weights, means.

A segment is a stretch of one sample's tokens that are computed now. All of its tokens see the `base` tokens before it;
behind them a chain's token sees those up to itself, a tree's the columns marked for it. Keys and values of a sample and
KV head are read front to back, once for a block of rows.

Whatever else is computed beside it, a score is eight chains of fused multiply-adds over the head, added in one order;
a mean is one chain over the positions, in order, in which a position of weight 0 changes nothing. So results do not
depend on other queries, on decoys, on the length of the cache or on where in it a token lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llvmlite import ir

from ..cache.segments import SEGMENT_FIELDS
from .writer import ADDRESS, FLOAT, INTEGER, MINUS_INFINITY, WIDTH, Writer

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


class Part:
    """Addresses of what belongs to each row; rows lie token by token, query by query."""

    def __init__(
        self, w: Writer, segment: Mapping[str, Any], *, head: Any, begin: Any, tokens: Any, size: int
    ) -> None:
        """`begin` is the first of the segment's tokens that belong to the part, `tokens` their number."""
        self.w, self.segment, self.begin, self.tokens, self.size = w, segment, begin, tokens, size
        self.rows = w.times(tokens, w.at["queries"])
        self.is_chain = w.ir.icmp_signed("==", segment["seen"], INTEGER(0))
        first = w.ir.add(segment["first"], begin)
        self._place = w.sum(w.times(first, w.at["heads"]), head)

    def weights(self, row: Any) -> Any:
        """Where a row's scores, then its weights, are kept."""
        return self.w.address(self.w.at["weights"], self.w.times(row, self.w.at["capacity"]))

    def query(self, row: Any) -> Any:
        """A row's query, in [tokens, heads, queries + 2, size]."""
        return self._element("qkv", row, self.w.ir.add(self.w.at["queries"], INTEGER(2)))

    def out(self, row: Any) -> Any:
        """Where a row's result goes, in [tokens, heads, queries, size]."""
        return self._element("out", row, self.w.at["queries"])

    def _element(self, name: str, row: Any, lanes: Any) -> Any:
        w = self.w
        token, query = w.ir.udiv(row, w.at["queries"]), w.ir.urem(row, w.at["queries"])
        place = w.sum(self._place, w.times(token, w.at["heads"]))
        return w.address(w.at[name], w.times(w.sum(w.times(place, lanes), query), self.size))


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


BLOCK_ROWS = 32
"Rows whose weights are kept at a time."

STORE = {
    **dict.fromkeys(("cells", "qkv", "segments"), ADDRESS),
    **dict.fromkeys(("num", "slots", "slot_heads", "heads", "lanes", "capacity"), INTEGER),
}
ATTEND = {
    **dict.fromkeys(("out", "qkv", "cells", "segments", "weights"), ADDRESS),
    **dict.fromkeys(
        ("num", "slots", "slot_heads", "heads", "queries", "capacity", "block", "window"), INTEGER
    ),
    **dict.fromkeys(("scale", "cap"), FLOAT),
}


def write_store(module: ir.Module, size: int) -> None:
    """`store`: write the tokens' keys and values into one layer's cells [2, slots, slot_heads, capacity, size].

    `cells` begin with the first of the heads: a slot may have more, of which other ranks write theirs.
    """
    w = Writer(module, "store", STORE)
    at = w.at
    with w.loop(at["num"]) as each:
        segment = _span(w, each.index)
        with w.loop(segment["count"]) as token, w.loop(at["heads"]) as head:
            place = w.sum(w.times(w.ir.add(segment["first"], token.index), at["heads"]), head.index)
            source = w.address(at["qkv"], w.times(place, at["lanes"], size))
            source = w.address(source, w.times(w.ir.sub(at["lanes"], INTEGER(2)), size))
            row = w.sum(w.times(segment["slot"], at["slot_heads"]), head.index)
            position = w.sum(w.times(row, at["capacity"]), segment["start"], token.index)
            target = w.address(at["cells"], w.times(position, size))
            w.copy(target, source, INTEGER(size))
            values = w.times(at["slots"], at["slot_heads"], at["capacity"], size)
            w.copy(w.address(target, values), w.address(source, INTEGER(size)), INTEGER(size))
    w.finish()


def write_attend(module: ir.Module, size: int, width: int) -> None:
    """`attend`: what each query sees, [tokens, heads * queries * size]; keys and values are in the cells (`store`).

    `weights` holds `block` tokens' weights of one KV head, a row of `capacity` for each query. `window` is how many
    tokens back a token sees, itself included; 0: all. `scale` is 1 / sqrt(size), or as the model says, times log2(e).
    `cap` bounds scores, as cap * tanh(score / cap), in the same units; 0: they are not bounded. `width` is that of the
    processor's vectors: how many rows are computed abreast depends on it, and no result does.
    """
    w = Writer(module, "attend", ATTEND)
    at = w.at
    most = w.times(at["block"], at["queries"])
    packed = w.alloca(w.times(w.ir.add(most, INTEGER(1)), size))
    totals = w.alloca(most)
    with w.loop(at["num"]) as each, w.loop(at["heads"]) as head:
        segment = _span(w, each.index)
        row = w.sum(w.times(segment["slot"], at["slot_heads"]), head.index)
        keys = w.address(at["cells"], w.times(row, at["capacity"], size))
        values = w.address(keys, w.times(at["slots"], at["slot_heads"], at["capacity"], size))
        with w.loop(segment["count"], step=at["block"]) as block:
            left = w.ir.sub(segment["count"], block.index)
            tokens = w.ir.select(w.ir.icmp_signed("<", left, at["block"]), left, at["block"])
            part = Part(w, segment, head=head.index, begin=block.index, tokens=tokens, size=size)
            view = _view(w, part)
            abreast = width // WIDTH
            pack_queries(part, packed, abreast=abreast)
            write_scores(part, packed, keys, view, abreast=abreast)
            with w.ir.if_then(w.ir.fcmp_ordered(">", at["cap"], FLOAT(0.0))):
                _bound(w, part, view)
            _mask(w, part, view)
            with w.loop(part.rows) as row:
                _soften(w, part.weights(row.index), view, width)
            write_means(part, totals, values, view, width=width)
    w.finish()


def _span(w: Writer, index: Any) -> dict[str, Any]:
    """Load the fields of a segment."""
    first = w.times(index, len(SEGMENT_FIELDS))
    return {
        name: w.load(w.at["segments"], w.ir.add(first, INTEGER(number)), INTEGER, element=INTEGER)
        for number, name in enumerate(SEGMENT_FIELDS)
    }


def _view(w: Writer, part: Part) -> Any:
    """Positions that the last token of the block may see, in whole vectors."""
    chain = w.sum(part.segment["start"], part.begin, part.tokens)
    tree = w.ir.add(part.segment["base"], part.segment["columns"])
    view = w.ir.select(part.is_chain, chain, tree)
    return w.ir.and_(w.ir.add(view, INTEGER(WIDTH - 1)), INTEGER(-WIDTH))


def _bound(w: Writer, part: Part, view: Any) -> None:
    """Bend scores towards the cap."""
    cap = w.splat(w.at["cap"])
    with w.loop(part.rows) as row:
        scores = part.weights(row.index)
        with w.loop(view, step=WIDTH) as each:
            ratio = w.ir.fdiv(w.load(scores, each.index), cap)
            w.store(w.ir.fmul(cap, w.tanh(ratio)), scores, each.index)


def _mask(w: Writer, part: Part, view: Any) -> None:
    """Set the scores of what a token does not see to -inf."""
    at, segment = w.at, part.segment
    with w.loop(part.tokens) as token:
        index = w.ir.add(part.begin, token.index)
        with w.ir.if_else(part.is_chain) as (chain, tree):
            with chain:
                itself = w.ir.add(segment["start"], index)
                _forget(w, part, token.index, w.ir.add(itself, INTEGER(1)), view)
                with w.ir.if_then(w.ir.icmp_signed(">", at["window"], INTEGER(0))):
                    before = w.sum(w.ir.sub(itself, at["window"]), INTEGER(1))
                    _forget(w, part, token.index, INTEGER(0), before)
            with tree:
                _forget(w, part, token.index, w.ir.add(segment["base"], segment["columns"]), view)
                _mask_columns(w, part, token.index, index)


def _mask_columns(w: Writer, part: Part, token: Any, index: Any) -> None:
    """A tree's token: the columns not marked for it, and what lies before its window."""
    at, segment, byte = w.at, part.segment, ir.IntType(8)
    seen = w.ir.inttoptr(w.ir.add(segment["seen"], w.ir.mul(index, segment["columns"])), ADDRESS)
    windowed = w.ir.icmp_signed(">", at["window"], INTEGER(0))
    depths = w.ir.inttoptr(segment["depth"], ADDRESS)
    with w.loop(segment["columns"]) as column:
        mark = w.ir.load(w.address(seen, column.index, byte), typ=byte, align=1)
        place = w.ir.add(segment["base"], column.index)
        with w.ir.if_then(w.ir.icmp_signed("==", mark, byte(0))):
            _forget(w, part, token, place, w.ir.add(place, INTEGER(1)))
    with w.ir.if_then(windowed):
        earlier = w.ir.sub(segment["start"], segment["base"])
        depth = w.load(depths, w.ir.add(earlier, index), INTEGER, element=INTEGER)
        # the shallowest depth that is seen; positions before the tree count down from 0
        least = w.sum(w.ir.sub(depth, at["window"]), INTEGER(1))
        first = w.ir.add(segment["base"], least)
        before = w.ir.select(w.ir.icmp_signed("<", first, segment["base"]), first, segment["base"])
        _forget(w, part, token, INTEGER(0), before)
        with w.loop(segment["columns"]) as column:
            other = w.load(depths, column.index, INTEGER, element=INTEGER)
            place = w.ir.add(segment["base"], column.index)
            with w.ir.if_then(w.ir.icmp_signed("<", other, least)):
                _forget(w, part, token, place, w.ir.add(place, INTEGER(1)))


def _forget(w: Writer, part: Part, token: Any, begin: Any, end: Any) -> None:
    """Set a token's scores from `begin` to before `end` to -inf, for all of its queries."""
    count, queries = w.ir.sub(end, begin), w.at["queries"]
    with w.ir.if_then(w.ir.icmp_signed(">", count, INTEGER(0))), w.loop(queries) as query:
        row = w.ir.add(w.ir.mul(token, queries), query.index)
        scores = w.address(part.weights(row), begin)
        with w.loop(count) as each:
            w.store(FLOAT(MINUS_INFINITY), scores, each.index)


def _soften(w: Writer, weights: Any, view: Any, width: int) -> None:
    """Turn a row's scores into powers of two of their distance to the largest."""
    with w.loop(view, step=WIDTH, start=[w.splat(MINUS_INFINITY)]) as each:
        each.values = [w.larger(each.values[0], w.load(weights, each.index))]
    largest = w.first(w.across(w.larger, each.values[0]))
    for lanes, begin, count in w.in_vectors(view, width):
        distance_to, kind = w.splat(largest, lanes), ir.VectorType(FLOAT, lanes)
        with w.if_any(count), w.loop(count, step=lanes) as each:
            place = w.ir.add(begin, each.index)
            scores = w.load(weights, place, kind)
            w.store(w.exp2(w.ir.fsub(scores, distance_to)), weights, place)
