"""What lies between a layer's products: norms, rotations, gates.

Library calls for them take longer to be dispatched than to run at small batches: some 25 calls a layer. Rows are
computed alone and in one order, so a result does not depend on the rows beside it.
"""

from __future__ import annotations

from llvmlite import ir

from ..attention.backends import LOG2_E
from ..cache.segments import SEGMENT_FIELDS
from .writer import ADDRESS, FLOAT, INTEGER, VECTOR, WIDTH, Writer

NORMS = {
    **dict.fromkeys(("out", "x", "gains"), ADDRESS),
    **dict.fromkeys(("groups", "lanes", "size", "group_stride", "lane_stride"), INTEGER),
    "floor": FLOAT,
}
ROTATE = {
    **dict.fromkeys(("x", "rope"), ADDRESS),
    **dict.fromkeys(("tokens", "heads", "turned", "lanes", "size"), INTEGER),
}
EMBED = {
    **dict.fromkeys(("out", "ids", "table"), ADDRESS),
    **dict.fromkeys(("rows", "id_stride", "size"), INTEGER),
}
TURN = {
    **dict.fromkeys(("out", "segments", "table"), ADDRESS),
    **dict.fromkeys(("num", "size"), INTEGER),
}
ADVANCE = {"segments": ADDRESS, "num": INTEGER}
GATE = {"out": ADDRESS, "both": ADDRESS, "rows": INTEGER, "size": INTEGER}


def write_norms(module: ir.Module, *, gained: bool) -> None:
    """`norms` or `norms_gained`: x / sqrt(sum x^2 + floor) for rows of `size`; lane l times gains[l * size:].

    Rows lie in groups of lanes, whose strides x and out share.
    """
    w = Writer(module, "norms_gained" if gained else "norms", NORMS)
    at, size = w.at, w.at["size"]
    with w.loop(at["groups"]) as group, w.loop(at["lanes"]) as lane:
        row = w.sum(w.times(group.index, at["group_stride"]), w.times(lane.index, at["lane_stride"]))
        x, out = w.address(at["x"], row), w.address(at["out"], row)
        with w.loop(size, step=WIDTH, start=[w.splat(0.0)]) as squares:
            value = w.load(x, squares.index)
            squares.values = [w.fma(value, value, squares.values[0])]
        total = w.across(w.ir.fadd, squares.values[0])
        length = w.sqrt(w.ir.fadd(total, w.splat(at["floor"])))
        factor = w.ir.fdiv(w.splat(1.0), length)
        gains = w.address(at["gains"], w.times(lane.index, size))
        with w.loop(size, step=WIDTH) as each:
            value = w.ir.fmul(w.load(x, each.index), factor)
            if gained:
                value = w.ir.fmul(value, w.load(gains, each.index))
            w.store(value, out, each.index)
    w.finish()


def write_rotate(module: ir.Module) -> None:
    """`rotate`: in x [tokens, heads, lanes, size], in place, neighbours (a, b) of the lanes turned become
    (a cos - b sin, b cos + a sin); rope [tokens, size / 2, 2] holds each token's cosines and sines.
    """
    w = Writer(module, "rotate", ROTATE)
    at, size = w.at, w.at["size"]
    minus_plus = ir.Constant(VECTOR, [-1.0, 1.0] * (WIDTH // 2))
    even, odd = [lane & ~1 for lane in range(WIDTH)], [lane | 1 for lane in range(WIDTH)]
    with w.loop(at["tokens"]) as token, w.loop(at["heads"]) as head, w.loop(at["turned"]) as lane:
        rope = w.address(at["rope"], w.times(token.index, size))
        place = w.sum(w.times(token.index, at["heads"]), head.index)
        x = w.address(at["x"], w.times(w.sum(w.times(place, at["lanes"]), lane.index), size))
        with w.loop(size, step=WIDTH) as each:
            pairs, turn = w.load(x, each.index), w.load(rope, each.index)
            cosine, sine = w.shuffle(turn, turn, even), w.ir.fmul(w.shuffle(turn, turn, odd), minus_plus)
            swapped = w.shuffle(pairs, pairs, [lane ^ 1 for lane in range(WIDTH)])
            w.store(w.fma(swapped, sine, w.ir.fmul(pairs, cosine)), x, each.index)
    w.finish()


def write_gate(module: ir.Module) -> None:
    """`gate`: silu(gate) * up, of [rows, 2 size] with the gates first."""
    w = Writer(module, "gate", GATE)
    at, size = w.at, w.at["size"]
    with w.loop(at["rows"]) as row:
        out = w.address(at["out"], w.times(row.index, size))
        gates = w.address(at["both"], w.times(row.index, size, 2))
        ups = w.address(gates, size)
        with w.loop(size, step=WIDTH) as each:
            gate, up = w.load(gates, each.index), w.load(ups, each.index)
            power = w.exp2(w.ir.fmul(gate, w.splat(-LOG2_E)))
            gated = w.ir.fdiv(gate, w.ir.fadd(w.splat(1.0), power))
            w.store(w.ir.fmul(gated, up), out, each.index)
    w.finish()


def write_embed(module: ir.Module, *, bfloat16: bool) -> None:
    """`embed` or `embed_bfloat16`: the table's rows of `size` for ids (int64) that lie `id_stride` apart."""
    w = Writer(module, "embed" + "_bfloat16" * bfloat16, EMBED)
    at, size = w.at, w.at["size"]
    element = ir.IntType(16) if bfloat16 else FLOAT
    with w.loop(at["rows"]) as row:
        number = w.load(at["ids"], w.times(row.index, at["id_stride"]), INTEGER, element=INTEGER)
        source = w.address(at["table"], w.times(number, size), element)
        out = w.address(at["out"], w.times(row.index, size))
        with w.loop(size, step=WIDTH) as each:
            value = w.load_bfloat16(source, each.index) if bfloat16 else w.load(source, each.index)
            w.store(value, out, each.index)
    w.finish()


def write_turn(module: ir.Module) -> None:
    """`turn`: the table's rows of `size` for the positions at which segments of one token start."""
    w = Writer(module, "turn", TURN)
    at, size = w.at, w.at["size"]
    with w.loop(at["num"]) as segment:
        place = w.sum(w.times(segment.index, len(SEGMENT_FIELDS)), INTEGER(SEGMENT_FIELDS.index("start")))
        position = w.load(at["segments"], place, INTEGER, element=INTEGER)
        out = w.address(at["out"], w.times(segment.index, size))
        w.copy(out, w.address(at["table"], w.times(position, size)), size)
    w.finish()


def write_advance(module: ir.Module) -> None:
    """`advance`: segments start one position later."""
    w = Writer(module, "advance", ADVANCE)
    with w.loop(w.at["num"]) as segment:
        place = w.sum(w.times(segment.index, len(SEGMENT_FIELDS)), INTEGER(SEGMENT_FIELDS.index("start")))
        start = w.load(w.at["segments"], place, INTEGER, element=INTEGER)
        w.ir.store(w.ir.add(start, INTEGER(1)), w.address(w.at["segments"], place, INTEGER), align=8)
    w.finish()
