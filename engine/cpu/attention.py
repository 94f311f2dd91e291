"""Attention over cached tokens, written for one head size: keys and values stored, scores, weights, means.

A segment is a stretch of one sample's tokens that are computed now. All of its tokens see the `base` tokens before it;
behind them a chain's token sees those up to itself, a tree's the columns marked for it. Keys and values of a sample and
KV head are read front to back, once for a block of rows.

Whatever else is computed beside it, a score is eight chains of fused multiply-adds over the head, added in one order;
a mean is one chain over the positions, in order, in which a position of weight 0 changes nothing. So results do not
depend on other queries, on decoys, on the length of the cache or on where in it a token lies.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from rlhfspec.engine.cache.segments import SEGMENT_FIELDS
from rlhfspec.engine.cpu.part import Part
from rlhfspec.engine.cpu.scores import pack_queries, write_scores
from rlhfspec.engine.cpu.weighted_values import write_means
from rlhfspec.engine.cpu.writer import ADDRESS, FLOAT, INTEGER, MINUS_INFINITY, WIDTH, Writer

BLOCK_ROWS = 32
"Rows whose weights are kept at a time."

STORE = {
    **dict.fromkeys(("cells", "qkv", "segments"), ADDRESS),
    **dict.fromkeys(("num", "slots", "heads", "lanes", "capacity"), INTEGER),
}
ATTEND = {
    **dict.fromkeys(("out", "qkv", "cells", "segments", "weights"), ADDRESS),
    **dict.fromkeys(("num", "slots", "heads", "queries", "capacity", "block", "window"), INTEGER),
    **dict.fromkeys(("scale", "cap"), FLOAT),
}


def write_store(module: ir.Module, size: int) -> None:
    """`store`: write the tokens' keys and values into one layer's cells [2, slots, heads, capacity, size]."""
    w = Writer(module, "store", STORE)
    at = w.at
    with w.loop(at["num"]) as each:
        segment = _span(w, each.index)
        with w.loop(segment["count"]) as token, w.loop(at["heads"]) as head:
            place = w.sum(w.times(w.ir.add(segment["first"], token.index), at["heads"]), head.index)
            source = w.address(at["qkv"], w.times(place, at["lanes"], size))
            source = w.address(source, w.times(w.ir.sub(at["lanes"], INTEGER(2)), size))
            row = w.sum(w.times(segment["slot"], at["heads"]), head.index)
            position = w.sum(w.times(row, at["capacity"]), segment["start"], token.index)
            target = w.address(at["cells"], w.times(position, size))
            w.copy(target, source, INTEGER(size))
            values = w.times(at["slots"], at["heads"], at["capacity"], size)
            w.copy(w.address(target, values), w.address(source, INTEGER(size)), INTEGER(size))
    w.finish()


def write_attend(module: ir.Module, size: int, width: int) -> None:
    """`attend`: what each query sees, [tokens, heads * queries * size]; keys and values are in the cells.

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
        row = w.sum(w.times(segment["slot"], at["heads"]), head.index)
        keys = w.address(at["cells"], w.times(row, at["capacity"], size))
        values = w.address(keys, w.times(at["slots"], at["heads"], at["capacity"], size))
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
