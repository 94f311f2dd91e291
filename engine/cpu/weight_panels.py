"""Rows of published tensors to the panels that products read (`engine.cpu.products`), and the same again to compare.

Sixteen rows are read at once, eight elements of each, turned and written as eight lines of a panel: every byte of a
weight passes once, however its rows are ordered and whatever it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from .products import PANEL
from .writer import ADDRESS, FLOAT, INTEGER, WIDTH, Writer

PANELS: dict[str, ir.Type] = {
    **dict.fromkeys(("panels", "rows", "gains", "differ"), ADDRESS),
    **dict.fromkeys(("num", "depth"), INTEGER),
}
"""`rows`: the address of each row of all panels, int64; `gains`: of each of `depth` columns.

`compares` writes nothing but `differ`, which stays all zeros where no bit differs."""
DIFFER_BYTES = 4 * WIDTH
_LOWER = (0, 8, 1, 9, 2, 10, 3, 11)
_UPPER = (4, 12, 5, 13, 6, 14, 7, 15)


def panels_name(*, compares: bool, gained: bool, bfloat16: bool) -> str:
    """Return the name of one of the operations; gains are multiplied into float32 alone."""
    return ("panels_differ" if compares else "panels") + "_gained" * gained + "_bfloat16" * bfloat16


def write_panels(module: ir.Module, *, compares: bool, gained: bool, bfloat16: bool) -> None:
    """One of the operations that `panels_name` names."""
    w = Writer(module, panels_name(compares=compares, gained=gained, bfloat16=bfloat16), PANELS)
    at, depth = w.at, w.at["depth"]
    bits = ir.IntType(16 if bfloat16 else 32)
    element: ir.Type = bits if bfloat16 else FLOAT

    def block(rows: Sequence[Any], panel: Any, k: Any, lanes: int) -> None:
        """Columns k to k + lanes - 1 of a panel's rows."""
        kind = ir.VectorType(element, lanes) if lanes > 1 else element
        whole = ir.VectorType(bits, lanes) if lanes > 1 else bits
        size = bits.width // 8
        values = [w.ir.load(w.address(row, k, element), typ=kind, align=size) for row in rows]
        if gained:
            gains = w.ir.load(w.address(at["gains"], k, element), typ=kind, align=size)
            values = [w.ir.fmul(value, gains) for value in values]
        # of a lane alone there is nothing to turn: value r is row r's
        turned = values if lanes == 1 else [*_turned(w, values[:WIDTH]), *_turned(w, values[WIDTH:])]
        odd: Any = None
        for number, value in enumerate(turned):
            line, group = (0, number) if lanes == 1 else (number % WIDTH, number // WIDTH * WIDTH)
            place = w.address(panel, w.sum(w.times(k, PANEL), INTEGER(line * PANEL + group)), element)
            if not compares:
                w.ir.store(value, place, align=size)
                continue
            held = w.ir.bitcast(w.ir.load(place, typ=kind, align=size), whole)
            differs = w.ir.xor(w.ir.bitcast(value, whole), held)
            odd = differs if odd is None else w.ir.or_(odd, differs)
        if odd is not None:
            before = w.ir.load(at["differ"], typ=whole, align=size)
            w.ir.store(w.ir.or_(before, odd), at["differ"], align=size)

    vectors = w.ir.and_(depth, INTEGER(-WIDTH))
    rest = w.ir.sub(depth, vectors)
    with w.loop(at["num"]) as panel:
        first = w.times(panel.index, PANEL)
        rows = [
            w.ir.inttoptr(w.load(at["rows"], w.sum(first, INTEGER(r)), INTEGER, element=INTEGER), ADDRESS)
            for r in range(PANEL)
        ]
        lines = w.address(at["panels"], w.times(first, depth), element)
        with w.if_any(vectors), w.loop(vectors, step=WIDTH) as each:
            block(rows, lines, each.index, WIDTH)
        with w.if_any(rest), w.loop(rest) as one:
            block(rows, lines, w.sum(vectors, one.index), 1)
    w.finish()


def _turned(w: Writer, rows: Sequence[Any]) -> list[Any]:
    """Turn eight vectors of eight: vector k holds lane k of each."""
    half = WIDTH // 2
    for _ in range(3):
        pairs = [(rows[i], rows[i + half]) for i in range(half)]
        rows = [w.shuffle(a, b, lanes) for a, b in pairs for lanes in (_LOWER, _UPPER)]
    return list(rows)
