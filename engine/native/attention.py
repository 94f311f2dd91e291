"""Attention over cached tokens, written for one head size: keys and values stored, scores, weights, means.

A span is a stretch of one sample's tokens that are computed now. All of its tokens see the `base` tokens before it;
behind them a chain's token sees those up to itself, a tree's the columns marked for it. Keys and values of a sample and
KV head are read front to back, once for a block of rows.

Whatever else is computed beside it, a score is eight chains of fused multiply-adds over the head, added in one order;
a mean is one chain over the positions, in order, in which a position of weight 0 changes nothing. So results do not
depend on other queries, on decoys, on the length of the cache or on where in it a token lies.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.native.writer import ADDRESS, FLOAT, INTEGER, MINUS_INFINITY, WIDTH, Writer

SPAN_FIELDS = ("slot", "first", "count", "start", "base", "columns", "seen", "depth")
"""Of each span, as 64-bit integers: its slot; its first packed token and their number; the position of the first;
tokens that all see; columns behind them; addresses of what each token sees of the columns (bytes [count, columns];
0: a chain) and of the columns' depth (integers; 0: a chain)."""
BLOCK_ROWS = 32
"Rows whose weights are kept at a time."
MEANS_TOGETHER = 64
"Elements of a head whose means are summed at a time: eight vectors stay in registers."

STORE = {
    **dict.fromkeys(("cells", "qkv", "spans"), ADDRESS),
    **dict.fromkeys(("num", "slots", "heads", "lanes", "capacity"), INTEGER),
}
ATTEND = {
    **dict.fromkeys(("out", "qkv", "cells", "spans", "weights"), ADDRESS),
    **dict.fromkeys(("num", "slots", "heads", "queries", "capacity", "block", "window"), INTEGER),
    **dict.fromkeys(("scale", "cap"), FLOAT),
}


def write_store(module: ir.Module, size: int) -> None:
    """`store`: write the tokens' keys and values into one layer's cells [2, slots, heads, capacity, size]."""
    w = Writer(module, "store", STORE)
    at = w.at
    with w.loop(at["num"]) as each:
        span = _span(w, each.index)
        with w.loop(span["count"]) as token, w.loop(at["heads"]) as head:
            place = _token_and_head(w, span, token.index, head.index)
            source = w.address(at["qkv"], w.times(place, at["lanes"], size))
            source = w.address(source, w.times(w.ir.sub(at["lanes"], INTEGER(2)), size))
            row = w.sum(w.times(span["slot"], at["heads"]), head.index)
            position = w.sum(w.times(row, at["capacity"]), span["start"], token.index)
            target = w.address(at["cells"], w.times(position, size))
            w.copy(target, source, INTEGER(size))
            values = w.times(at["slots"], at["heads"], at["capacity"], size)
            w.copy(w.address(target, values), w.address(source, INTEGER(size)), INTEGER(size))
    w.finish()


def write_attend(module: ir.Module, size: int) -> None:
    """`attend`: what each query sees, [tokens, heads * queries * size]; keys and values are in the cells.

    `weights` holds `block` tokens' weights of one KV head, a row of `capacity` for each query. `window` is how many
    tokens back a token sees, itself included; 0: all. `scale` is 1 / sqrt(size), or as the model says, times log2(e).
    `cap` bounds scores, as cap * tanh(score / cap), in the same units; 0: they are not bounded.
    """
    w = Writer(module, "attend", ATTEND)
    at = w.at
    with w.loop(at["num"]) as each, w.loop(at["heads"]) as head:
        span = _span(w, each.index)
        row = w.sum(w.times(span["slot"], at["heads"]), head.index)
        keys = w.address(at["cells"], w.times(row, at["capacity"], size))
        values = w.address(keys, w.times(at["slots"], at["heads"], at["capacity"], size))
        with w.loop(span["count"], step=at["block"]) as block:
            left = w.ir.sub(span["count"], block.index)
            tokens = w.ir.select(w.ir.icmp_signed("<", left, at["block"]), left, at["block"])
            part = {**span, "begin": block.index, "tokens": tokens, "head": head.index}
            view = _view(w, part)
            _scores(w, part, keys, view, size)
            with w.ir.if_then(w.ir.fcmp_ordered(">", at["cap"], FLOAT(0.0))):
                _bound(w, part, view)
            _mask(w, part, view)
            with w.loop(tokens) as token, w.loop(at["queries"]) as query:
                weights = _row(w, token.index, query.index)
                _soften(w, weights, view)
                index = w.ir.add(block.index, token.index)
                place = _token_and_head(w, span, index, head.index)
                out = w.address(at["out"], w.times(w.sum(w.times(place, at["queries"]), query.index), size))
                _means(w, out, weights, values, view, size)
    w.finish()


def _span(w: Writer, index: Any) -> dict[str, Any]:
    """Load the fields of a span."""
    first = w.times(index, len(SPAN_FIELDS))
    return {
        name: w.load(w.at["spans"], w.ir.add(first, INTEGER(number)), INTEGER, element=INTEGER)
        for number, name in enumerate(SPAN_FIELDS)
    }


def _token_and_head(w: Writer, span: dict[str, Any], token: Any, head: Any) -> Any:
    return w.sum(w.times(w.ir.add(span["first"], token), w.at["heads"]), head)


def _row(w: Writer, token: Any, query: Any) -> Any:
    """Where a query's weights are kept."""
    return w.address(
        w.at["weights"], w.times(w.sum(w.times(token, w.at["queries"]), query), w.at["capacity"])
    )


def _view(w: Writer, part: dict[str, Any]) -> Any:
    """Positions that the last token of the block may see, in whole vectors."""
    chain = w.sum(part["start"], part["begin"], part["tokens"])
    tree = w.ir.add(part["base"], part["columns"])
    view = w.ir.select(_is_zero(w, part["seen"]), chain, tree)
    return w.ir.and_(w.ir.add(view, INTEGER(WIDTH - 1)), INTEGER(-WIDTH))


def _scores(w: Writer, part: dict[str, Any], keys: Any, view: Any, size: int) -> None:
    """Eight positions at a time, for every query of the block: dot products times the scale."""
    at = w.at
    scale = w.splat(at["scale"])
    with w.loop(view, step=WIDTH) as eight:
        here = w.address(keys, w.times(eight.index, size))
        with w.loop(part["tokens"]) as token:
            place = _token_and_head(w, part, w.ir.add(part["begin"], token.index), part["head"])
            lanes = w.address(at["qkv"], w.times(place, w.ir.add(at["queries"], INTEGER(2)), size))
            with w.loop(at["queries"]) as query:
                q = w.address(lanes, w.times(query.index, size))
                sums = [w.splat(0.0) for _ in range(WIDTH)]
                for start in range(0, size, WIDTH):
                    element = w.load(q, INTEGER(start))
                    for c in range(WIDTH):
                        sums[c] = w.fma(w.load(here, INTEGER(c * size + start)), element, sums[c])
                scores = w.ir.fmul(w.sum_of_each(sums), scale)
                w.store(scores, _row(w, token.index, query.index), eight.index)


def _bound(w: Writer, part: dict[str, Any], view: Any) -> None:
    """Bend scores towards the cap."""
    cap = w.splat(w.at["cap"])
    with w.loop(part["tokens"]) as token, w.loop(w.at["queries"]) as query:
        row = _row(w, token.index, query.index)
        with w.loop(view, step=WIDTH) as each:
            ratio = w.ir.fdiv(w.load(row, each.index), cap)
            w.store(w.ir.fmul(cap, w.tanh(ratio)), row, each.index)


def _mask(w: Writer, part: dict[str, Any], view: Any) -> None:
    """Set the scores of what a token does not see to -inf."""
    at = w.at
    with w.loop(part["tokens"]) as token:
        index = w.ir.add(part["begin"], token.index)
        with w.ir.if_else(_is_zero(w, part["seen"])) as (chain, tree):
            with chain:
                itself = w.ir.add(part["start"], index)
                _forget(w, token.index, w.ir.add(itself, INTEGER(1)), view)
                with w.ir.if_then(w.ir.icmp_signed(">", at["window"], INTEGER(0))):
                    _forget(w, token.index, INTEGER(0), w.sum(w.ir.sub(itself, at["window"]), INTEGER(1)))
            with tree:
                _forget(w, token.index, w.ir.add(part["base"], part["columns"]), view)
                _mask_columns(w, part, token.index, index)


def _mask_columns(w: Writer, part: dict[str, Any], token: Any, index: Any) -> None:
    """A tree's token: the columns not marked for it, and what lies before its window."""
    at, byte = w.at, ir.IntType(8)
    seen = w.ir.inttoptr(w.ir.add(part["seen"], w.ir.mul(index, part["columns"])), ADDRESS)
    windowed = w.ir.icmp_signed(">", at["window"], INTEGER(0))
    depths = w.ir.inttoptr(part["depth"], ADDRESS)
    with w.loop(part["columns"]) as column:
        mark = w.ir.load(w.address(seen, column.index, byte), typ=byte, align=1)
        place = w.ir.add(part["base"], column.index)
        with w.ir.if_then(w.ir.icmp_signed("==", mark, byte(0))):
            _forget(w, token, place, w.ir.add(place, INTEGER(1)))
    with w.ir.if_then(windowed):
        earlier = w.ir.sub(part["start"], part["base"])
        depth = w.load(depths, w.ir.add(earlier, index), INTEGER, element=INTEGER)
        # the shallowest depth that is seen; positions before the tree count down from 0
        least = w.sum(w.ir.sub(depth, at["window"]), INTEGER(1))
        first = w.ir.add(part["base"], least)
        before = w.ir.select(w.ir.icmp_signed("<", first, part["base"]), first, part["base"])
        _forget(w, token, INTEGER(0), before)
        with w.loop(part["columns"]) as column:
            other = w.load(depths, column.index, INTEGER, element=INTEGER)
            place = w.ir.add(part["base"], column.index)
            with w.ir.if_then(w.ir.icmp_signed("<", other, least)):
                _forget(w, token, place, w.ir.add(place, INTEGER(1)))


def _forget(w: Writer, token: Any, begin: Any, end: Any) -> None:
    """Set a token's scores from `begin` to before `end` to -inf, for all of its queries."""
    count = w.ir.sub(end, begin)
    with w.ir.if_then(w.ir.icmp_signed(">", count, INTEGER(0))), w.loop(w.at["queries"]) as query:
        row = w.address(_row(w, token, query.index), begin)
        with w.loop(count) as each:
            w.store(FLOAT(MINUS_INFINITY), row, each.index)


def _soften(w: Writer, weights: Any, view: Any) -> None:
    """Turn a row's scores into powers of two of their distance to the largest."""
    with w.loop(view, step=WIDTH, start=[w.splat(MINUS_INFINITY)]) as each:
        each.values = [w.larger(each.values[0], w.load(weights, each.index))]
    largest = w.across(w.larger, each.values[0])
    with w.loop(view, step=WIDTH) as each:
        w.store(w.exp2(w.ir.fsub(w.load(weights, each.index), largest)), weights, each.index)


def _means(w: Writer, out: Any, weights: Any, values: Any, view: Any, size: int) -> None:
    """Sum of weighted values over sum of weights: one chain over the positions for each."""
    zeros = w.zeros(size)
    for begin in range(0, size, MEANS_TOGETHER):
        starts = range(begin, min(size, begin + MEANS_TOGETHER), WIDTH)
        with w.loop(view, start=[w.splat(0.0)] * (1 + len(starts))) as each:
            single = w.load(weights, each.index, FLOAT)
            weight = w.splat(single)
            # what a masked cell holds may not be a number
            unseen = w.ir.fcmp_ordered("==", single, FLOAT(0.0))
            value = w.ir.select(unseen, zeros, w.address(values, w.times(each.index, size)))
            total, *sums = each.values
            each.values = [w.ir.fadd(total, weight)] + [
                w.fma(w.load(value, INTEGER(start)), weight, x) for start, x in zip(starts, sums, strict=True)
            ]
        total, *sums = each.values
        for start, x in zip(starts, sums, strict=True):
            w.store(w.ir.fdiv(x, total), out, INTEGER(start))


def _is_zero(w: Writer, value: Any) -> Any:
    return w.ir.icmp_signed("==", value, INTEGER(0))
