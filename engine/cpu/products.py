"""x W^T with few rows, written as LLVM IR.

Library products are made for many rows. For 2 to 16 of them they take two to three times as long as the weights need to
come from memory, and the last bits of a row depend on how many there are. Here every result is one chain of fused
multiply-adds over k = 0, 1, .., whatever the number of rows, the vector width or the processor: batch invariance by
construction. K may be cut into up to four parts: each is a chain of its own, and they are added as (a + b) + (c + d)
(`engine.parts`).

    weights  [panels, K, PANEL]: PANEL columns of the result lie together, k by k, and are streamed once
    tile     a few rows by a panel or two: the sums stay in registers, the panels in cache for the next tile, while
             the next panels are on their way
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from ..parts import PARTS
from .writer import ADDRESS, INTEGER

PANEL = 16
"Columns of a panel: the layout of the weights is the same on every processor."


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a product is cut for vectors of one width."""

    rows: int
    "of a tile, at most"
    panels: int
    "of a tile; where fewer are left, one"
    fetched_ahead_from: int
    "rows from which each tile asks for a share of the next panels' lines: else memory rests while later tiles compute"


TILINGS = {
    # 12 sums, 2 vectors of weights and 1 of x fill the 16 registers of AVX2. Asking ahead, 8 rows take 0.70 of the
    # time without, 16 rows 0.75; one or two rows stream fast enough by themselves, bfloat16 ones do not
    8: Tiling(rows=6, panels=1, fetched_ahead_from=3),
    # AVX-512: a value of x that is loaded meets two vectors of weights; 28 sums, 2 vectors of weights and 1 of x fill
    # 31 of 32 registers. One panel and 6 rows take 1.4 times as long for 16 rows, two and 8 rows 1.1 times for 10, 20
    # and 160; not asking ahead takes 1.3 times as long for 1 and 2 rows
    16: Tiling(rows=14, panels=2, fetched_ahead_from=1),
}
"By floats in a vector; what is said of times was measured."

BRANCHES = PARTS // 2
"Pairs of parts, each added up by itself."

PRODUCT: dict[str, ir.Type] = {
    **dict.fromkeys(("out", "x", "weights", "added", "ends"), ADDRESS),
    **dict.fromkeys(("parts", "rows", "depth", "panels", "out_stride", "x_stride", "added_stride"), INTEGER),
}
"""Addresses, strides in elements; `ends` of the parts of K are int64, the last is the depth.

`product`: out = x W^T, `added` is not read; `product_added`: out = added + x W^T.
With `_bfloat16` behind the name the weights are bfloat16, widened as they are loaded; the rest is float32."""


def product_name(*, added: bool, bfloat16: bool) -> str:
    """Return the name of one of the four products."""
    return "product" + "_added" * added + "_bfloat16" * bfloat16


def products_text(*, width: int) -> str:
    """Write the four products with vectors of `width` floats; results do not depend on it."""
    vector = f"<{width} x float>"
    declared = f"declare {vector} @llvm.fma.v{width}f32({vector}, {vector}, {vector})\n"
    declared += "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"
    return declared + "".join(
        _function(width, added=added, bfloat16=bfloat16)
        for added in (False, True)
        for bfloat16 in (False, True)
    )


def _function(width: int, *, added: bool, bfloat16: bool) -> str:
    """A loop over panels, in it one over tiles of rows, in it one over parts of k, for each possible tile over k."""
    name, element = product_name(added=added, bfloat16=bfloat16), "i16" if bfloat16 else "float"
    tiling, vector = TILINGS[width], f"<{width} x float>"
    sums = tiling.rows * tiling.panels * (PANEL // width)
    shapes = [(rows, panels) for panels in sorted({1, tiling.panels}) for rows in range(1, tiling.rows + 1)]
    cases = "\n    ".join(
        f"i64 {rows + panels * tiling.rows}, label %rows{rows}x{panels}" for rows, panels in shapes
    )
    tiles = "".join(_tile(rows, panels, width, bfloat16=bfloat16) for rows, panels in shapes)
    return f"""
define void @{name}(ptr %out, ptr %x, ptr %w, ptr %added, ptr %ends, i64 %parts, i64 %rows, i64 %k,
                    i64 %panels, i64 %out_stride, i64 %x_stride, i64 %added_stride) {{
entry:
  %branches = alloca {vector}, i64 {BRANCHES * sums}, align 64
  %second = getelementptr {vector}, ptr %branches, i64 {sums}
  %is_tree = icmp ugt i64 %parts, 2
  %rounded = add i64 %rows, {tiling.rows - 1}
  %tiles = udiv i64 %rounded, {tiling.rows}
  %least = udiv i64 %rows, %tiles
  %larger = urem i64 %rows, %tiles
  %panel_size = mul i64 %k, {PANEL}
  %many = icmp ugt i64 %rows, {0 if bfloat16 else tiling.fetched_ahead_from - 1}
  %tile_size = mul i64 %panel_size, {tiling.panels}
  %next_panel = select i1 %many, i64 %tile_size, i64 0
  %fetch_step = udiv i64 {PANEL}, %tiles
  %share = mul i64 %k, %fetch_step
  br label %panel
panel:
  %p = phi i64 [0, %entry], [%next_p, %panel_end]
  %left = sub i64 %panels, %p
  %is_whole = icmp uge i64 %left, {tiling.panels}
  %abreast = select i1 %is_whole, i64 {tiling.panels}, i64 1
  %first_case = mul i64 %abreast, {tiling.rows}
  %w_offset = mul i64 %p, %panel_size
  %w_panel = getelementptr {element}, ptr %w, i64 %w_offset
  %column = mul i64 %p, {PANEL}
  br label %tile
tile:
  %t = phi i64 [0, %panel], [%next_t, %tile_end]
  %row = phi i64 [0, %panel], [%next_row, %tile_end]
  %is_larger = icmp ult i64 %t, %larger
  %fetched = mul i64 %t, %share
  %ahead_offset = add i64 %next_panel, %fetched
  %ahead = getelementptr {element}, ptr %w_panel, i64 %ahead_offset
  %one_more = zext i1 %is_larger to i64
  %size = add i64 %least, %one_more
  %case = add i64 %first_case, %size
  %across = mul i64 %abreast, {PANEL // width}
  %vectors = mul i64 %size, %across
{_parts(sums, width, cases, tiles)}
results:
  br label %result_row
{_results(width, added=added)}
tile_end:
  %next_t = add i64 %t, 1
  %next_row = add i64 %row, %size
  %more_tiles = icmp ult i64 %next_t, %tiles
  br i1 %more_tiles, label %tile, label %panel_end
panel_end:
  %next_p = add i64 %p, %abreast
  %more_panels = icmp ult i64 %next_p, %panels
  br i1 %more_panels, label %panel, label %done
done:
  ret void
}}
"""


def _parts(sums: int, width: int, cases: str, tiles: str) -> str:
    """A tile's sums over each part of k; every second one is added to the one before, in a branch of the tree."""
    vector = f"<{width} x float>"
    return f"""
  br label %part
part:
  %part_number = phi i64 [0, %tile], [%next_part, %part_end]
  %begin = phi i64 [0, %tile], [%end, %part_end]
  %end_place = getelementptr i64, ptr %ends, i64 %part_number
  %end = load i64, ptr %end_place, align 8
  %side = and i64 %part_number, 1
  %joins = icmp ne i64 %side, 0
  %branch_number = lshr i64 %part_number, 1
  %branch_offset = mul i64 %branch_number, {sums}
  %branch = getelementptr {vector}, ptr %branches, i64 %branch_offset
  switch i64 %case, label %part_end [
    {cases}
  ]
{tiles}
part_end:
  %next_part = add i64 %part_number, 1
  %more_parts = icmp ult i64 %next_part, %parts
  br i1 %more_parts, label %part, label %results
"""


def _tile(rows: int, panels: int, width: int, *, bfloat16: bool) -> str:
    """One tile of so many rows and panels: sums over k of one part."""
    per_panel = PANEL // width
    vector, vectors, n = f"<{width} x float>", panels * per_panel, f"r{rows}x{panels}"
    lines = [f"rows{rows}x{panels}:"]
    for i in range(rows):
        lines += [
            f"  %{n}_row{i} = add i64 %row, {i}",
            f"  %{n}_xo{i} = mul i64 %{n}_row{i}, %x_stride",
            f"  %{n}_x{i} = getelementptr float, ptr %x, i64 %{n}_xo{i}",
        ]
    lines += [f"  br label %loop_{n}", f"loop_{n}:"]
    lines.append(f"  %{n}_k = phi i64 [%begin, %rows{rows}x{panels}], [%{n}_k1, %loop_{n}]")
    for i in range(rows):
        for j in range(vectors):
            start = f"[zeroinitializer, %rows{rows}x{panels}]"
            lines.append(f"  %{n}_s{i}_{j} = phi {vector} {start}, [%{n}_f{i}_{j}, %loop_{n}]")
    lines.append(f"  %{n}_wk = mul i64 %{n}_k, {PANEL}")
    element = "i16" if bfloat16 else "float"
    lines.append(f"  %{n}_pk = mul i64 %{n}_k, %fetch_step")
    for panel in range(panels):
        before = ("%w_panel", "%ahead") if panel == 0 else (f"%{n}_wb{panel - 1}", f"%{n}_pb{panel - 1}")
        for of, start in zip("wp", before, strict=True):
            offset = "0" if panel == 0 else "%panel_size"
            lines.append(f"  %{n}_{of}b{panel} = getelementptr {element}, ptr {start}, i64 {offset}")
        lines += [
            f"  %{n}_wp{panel} = getelementptr {element}, ptr %{n}_wb{panel}, i64 %{n}_wk",
            f"  %{n}_pf{panel} = getelementptr {element}, ptr %{n}_pb{panel}, i64 %{n}_pk",
            f"  call void @llvm.prefetch.p0(ptr %{n}_pf{panel}, i32 0, i32 2, i32 1)",
        ]
    for j in range(vectors):
        panel, part = divmod(j, per_panel)
        lines.append(f"  %{n}_wa{j} = getelementptr {element}, ptr %{n}_wp{panel}, i64 {part * width}")
        lines += (
            _widened(n, j, width) if bfloat16 else [f"  %{n}_w{j} = load {vector}, ptr %{n}_wa{j}, align 4"]
        )
    for i in range(rows):
        lines += [
            f"  %{n}_xa{i} = getelementptr float, ptr %{n}_x{i}, i64 %{n}_k",
            f"  %{n}_xs{i} = load float, ptr %{n}_xa{i}, align 4",
            f"  %{n}_xi{i} = insertelement {vector} poison, float %{n}_xs{i}, i64 0",
            f"  %{n}_xv{i} = shufflevector {vector} %{n}_xi{i}, {vector} poison, <{width} x i32> zeroinitializer",
        ]
        for j in range(vectors):
            lines.append(
                f"  %{n}_f{i}_{j} = call {vector} @llvm.fma.v{width}f32"
                f"({vector} %{n}_xv{i}, {vector} %{n}_w{j}, {vector} %{n}_s{i}_{j})"
            )
    lines += [
        f"  %{n}_k1 = add i64 %{n}_k, 1",
        f"  %{n}_more = icmp ult i64 %{n}_k1, %end",
        f"  br i1 %{n}_more, label %loop_{n}, label %store_{n}",
        f"store_{n}:",
    ]
    for place, (i, j) in enumerate((i, j) for i in range(rows) for j in range(vectors)):
        lines += [
            f"  %{n}_z{place} = getelementptr {vector}, ptr %branch, i64 {place}",
            f"  %{n}_l{place} = load {vector}, ptr %{n}_z{place}, align {4 * width}",
            f"  %{n}_t{place} = fadd {vector} %{n}_l{place}, %{n}_f{i}_{j}",
            f"  %{n}_v{place} = select i1 %joins, {vector} %{n}_t{place}, {vector} %{n}_f{i}_{j}",
            f"  store {vector} %{n}_v{place}, ptr %{n}_z{place}, align {4 * width}",
        ]
    lines.append("  br label %part_end")
    return "\n".join(lines) + "\n"


def _widened(n: str, j: int, width: int) -> list[str]:
    """Load bfloat16 weights: they are the upper halves of floats."""
    shorts, words = f"<{width} x i16>", f"<{width} x i32>"
    half = ", ".join(["i32 16"] * width)
    return [
        f"  %{n}_wh{j} = load {shorts}, ptr %{n}_wa{j}, align 2",
        f"  %{n}_wz{j} = zext {shorts} %{n}_wh{j} to {words}",
        f"  %{n}_wu{j} = shl {words} %{n}_wz{j}, <{half}>",
        f"  %{n}_w{j} = bitcast {words} %{n}_wu{j} to <{width} x float>",
    ]


def _results(width: int, *, added: bool) -> str:
    """Store a tile's results, behind what they are added to."""
    vector, result = f"<{width} x float>", "%total" if added else "%sum"
    of_row = """
  %added_offset = mul i64 %result_at, %added_stride
  %added_column = add i64 %added_offset, %column
  %added_row = getelementptr float, ptr %added, i64 %added_column"""
    sum_up = f"""
  %added_place = getelementptr float, ptr %added_row, i64 %lane
  %before = load {vector}, ptr %added_place, align 4
  %total = fadd {vector} %before, %sum"""
    return f"""
result_row:
  %i = phi i64 [0, %results], [%next_i, %row_end]
  %result_at = add i64 %row, %i
  %out_offset = mul i64 %result_at, %out_stride
  %out_column = add i64 %out_offset, %column
  %out_row = getelementptr float, ptr %out, i64 %out_column{of_row if added else ""}
  %first_sum = mul i64 %i, %across
  br label %result
result:
  %j = phi i64 [0, %result_row], [%next_j, %result]
  %lane = mul i64 %j, {width}
  %sum_number = add i64 %first_sum, %j
  %sum_place = getelementptr {vector}, ptr %branches, i64 %sum_number
  %first = load {vector}, ptr %sum_place, align 32
  %other_place = getelementptr {vector}, ptr %second, i64 %sum_number
  %other = load {vector}, ptr %other_place, align 32
  %both = fadd {vector} %first, %other
  %sum = select i1 %is_tree, {vector} %both, {vector} %first{sum_up if added else ""}
  %out_place = getelementptr float, ptr %out_row, i64 %lane
  store {vector} {result}, ptr %out_place, align 4
  %next_j = add i64 %j, 1
  %more_results = icmp ult i64 %next_j, %across
  br i1 %more_results, label %result, label %row_end
row_end:
  %next_i = add i64 %i, 1
  %more_rows = icmp ult i64 %next_i, %size
  br i1 %more_rows, label %result_row, label %tile_end
"""
