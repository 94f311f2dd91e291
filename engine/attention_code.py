"""Machine code for attention over cached tokens: scores of queries, and weighted means of values.

Both read a sample's keys and values once, front to back; library products of such shapes take two to four times as
long. Whatever else is computed beside it, a score is the same eight chains of fused multiply-adds over the head, added
in one order; a mean is one chain over the positions, in order, in which a masked position (weight 0) changes nothing.
So results do not depend on other queries, on decoys, on the length of the view or on where in it a token lies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.machine_code import compile_module

WIDTH = 8
"Floats in a vector, on every processor: the order of a score's sum depends on it."
BLOCK = 64
"Elements of a head whose means are summed at a time: eight vectors stay in registers."
_V = f"<{WIDTH} x float>"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCode:
    """Compiled for one head size; strides are in elements, tensors are addressed. They hold no interpreter lock."""

    scores: Callable[..., None]
    "(out [N, R, C], q, keys, bias, N, R, C, q strides of n and r, keys' of n, bias' of n and r, scale)"
    means: Callable[..., None]
    "(out [N, R, E], weights [N, R, C], values, N, R, C, values' stride of n): sum(w v) / sum(w)"
    engine: Any
    "owns the code"


@lru_cache(maxsize=8)
def attention_code(head_size: int) -> AttentionCode:
    """Compile for a head size that is a multiple of WIDTH; once a process."""
    engine = compile_module(_scores(head_size) + _means(head_size), widths=(WIDTH,))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    scores = ctypes.CFUNCTYPE(None, *[pointer] * 4, *[integer] * 8, ctypes.c_float)
    means = ctypes.CFUNCTYPE(None, *[pointer] * 3, *[integer] * 4)
    return AttentionCode(
        scores=scores(engine.get_function_address("scores")),
        means=means(engine.get_function_address("means")),
        engine=engine,
    )


def _scores(size: int) -> str:
    """For each (n, eight positions, query): eight dot products, times the scale, plus the bias."""
    lines = []
    for c in range(WIDTH):
        lines.append(f"  %s{c}_0 = fadd {_V} zeroinitializer, zeroinitializer")
        lines.append(f"  %k{c} = getelementptr float, ptr %k_block, i64 {c * size}")
    for j in range(size // WIDTH):
        lines += [
            f"  %qa{j} = getelementptr float, ptr %q_row, i64 {j * WIDTH}",
            f"  %q{j} = load {_V}, ptr %qa{j}, align 4",
        ]
        for c in range(WIDTH):
            lines += [
                f"  %ka{c}_{j} = getelementptr float, ptr %k{c}, i64 {j * WIDTH}",
                f"  %kv{c}_{j} = load {_V}, ptr %ka{c}_{j}, align 4",
                f"  %s{c}_{j + 1} = call {_V} @llvm.fma.v{WIDTH}f32"
                f"({_V} %kv{c}_{j}, {_V} %q{j}, {_V} %s{c}_{j})",
            ]
    last = size // WIDTH
    sums, names = _sum_of_each([f"%s{c}_{last}" for c in range(WIDTH)])
    body = "\n".join(lines + sums)
    return f"""
define void @scores(ptr %out, ptr %q, ptr %keys, ptr %bias, i64 %num, i64 %rows, i64 %view,
                    i64 %q_n, i64 %q_r, i64 %k_n, i64 %b_n, i64 %b_r, float %scale) {{
entry:
  %scale_one = insertelement {_V} poison, float %scale, i64 0
  %scales = shufflevector {_V} %scale_one, {_V} poison, <{WIDTH} x i32> zeroinitializer
  %out_n = mul i64 %rows, %view
  br label %each_n
each_n:
  %n = phi i64 [0, %entry], [%n1, %end_n]
  %oo = mul i64 %n, %out_n
  %out_at = getelementptr float, ptr %out, i64 %oo
  %qo = mul i64 %n, %q_n
  %q_at = getelementptr float, ptr %q, i64 %qo
  %ko = mul i64 %n, %k_n
  %k_at = getelementptr float, ptr %keys, i64 %ko
  %bo = mul i64 %n, %b_n
  %b_at = getelementptr float, ptr %bias, i64 %bo
  br label %each_block
each_block:
  %c = phi i64 [0, %each_n], [%c1, %end_block]
  %kc = mul i64 %c, {size}
  %k_block = getelementptr float, ptr %k_at, i64 %kc
  br label %each_row
each_row:
  %r = phi i64 [0, %each_block], [%r1, %each_row]
  %qr = mul i64 %r, %q_r
  %q_row = getelementptr float, ptr %q_at, i64 %qr
{body}
  %br = mul i64 %r, %b_r
  %bc = add i64 %br, %c
  %b_here = getelementptr float, ptr %b_at, i64 %bc
  %biases = load {_V}, ptr %b_here, align 4
  %result = call {_V} @llvm.fma.v{WIDTH}f32({_V} {names}, {_V} %scales, {_V} %biases)
  %or = mul i64 %r, %view
  %oc = add i64 %or, %c
  %o_here = getelementptr float, ptr %out_at, i64 %oc
  store {_V} %result, ptr %o_here, align 4
  %r1 = add i64 %r, 1
  %more_rows = icmp ult i64 %r1, %rows
  br i1 %more_rows, label %each_row, label %end_block
end_block:
  %c1 = add i64 %c, {WIDTH}
  %more_blocks = icmp ult i64 %c1, %view
  br i1 %more_blocks, label %each_block, label %end_n
end_n:
  %n1 = add i64 %n, 1
  %more_n = icmp ult i64 %n1, %num
  br i1 %more_n, label %each_n, label %done
done:
  ret void
}}
"""


def _sum_of_each(vectors: list[str]) -> tuple[list[str], str]:
    """Lines that turn eight vectors into the vector of their sums; each sum is (01 + 23) + (45 + 67) of its lanes."""
    lines: list[str] = []
    stages = (
        ("0,8,2,10,4,12,6,14", "1,9,3,11,5,13,7,15"),
        ("0,1,8,9,4,5,12,13", "2,3,10,11,6,7,14,15"),
        ("0,1,2,3,8,9,10,11", "4,5,6,7,12,13,14,15"),
    )
    for number, masks in enumerate(stages):
        merged = []
        for pair in range(len(vectors) // 2):
            a, b, name = vectors[2 * pair], vectors[2 * pair + 1], f"%m{number}_{pair}"
            for half, mask in zip(("l", "h"), masks, strict=True):
                order = ", ".join(f"i32 {lane}" for lane in mask.split(","))
                lines.append(f"  {name}{half} = shufflevector {_V} {a}, {_V} {b}, <8 x i32> <{order}>")
            lines.append(f"  {name} = fadd {_V} {name}l, {name}h")
            merged.append(name)
        vectors = merged
    return lines, vectors[0]


def _means(size: int) -> str:
    """For each (n, query, block of the head): one chain over the positions for every element, one for the weights."""
    blocks = [(start, min(BLOCK, size - start) // WIDTH) for start in range(0, size, BLOCK)]
    code = []
    for number, (start, vectors) in enumerate(blocks):
        following = f"block{number + 1}" if number + 1 < len(blocks) else "end_row"
        n = f"b{number}"
        phis = [
            f"  %{n}_a{j} = phi {_V} [zeroinitializer, %block{number}], [%{n}_f{j}, %loop{number}]"
            for j in range(vectors)
        ]
        steps = []
        for j in range(vectors):
            steps += [
                f"  %{n}_va{j} = getelementptr float, ptr %{n}_v, i64 {start + j * WIDTH}",
                f"  %{n}_vv{j} = load {_V}, ptr %{n}_va{j}, align 4",
                f"  %{n}_f{j} = call {_V} @llvm.fma.v{WIDTH}f32({_V} %{n}_vv{j}, {_V} %{n}_w, {_V} %{n}_a{j})",
            ]
        stores = []
        for j in range(vectors):
            stores += [
                f"  %{n}_r{j} = fdiv {_V} %{n}_f{j}, %{n}_t1",
                f"  %{n}_oa{j} = getelementptr float, ptr %o_at, i64 {start + j * WIDTH}",
                f"  store {_V} %{n}_r{j}, ptr %{n}_oa{j}, align 4",
            ]
        code += [
            f"block{number}:",
            f"  br label %loop{number}",
            f"loop{number}:",
            f"  %{n}_c = phi i64 [0, %block{number}], [%{n}_c1, %loop{number}]",
            f"  %{n}_t = phi {_V} [zeroinitializer, %block{number}], [%{n}_t1, %loop{number}]",
            *phis,
            f"  %{n}_wa = getelementptr float, ptr %w_at, i64 %{n}_c",
            f"  %{n}_ws = load float, ptr %{n}_wa, align 4",
            f"  %{n}_wi = insertelement {_V} poison, float %{n}_ws, i64 0",
            f"  %{n}_w = shufflevector {_V} %{n}_wi, {_V} poison, <{WIDTH} x i32> zeroinitializer",
            f"  %{n}_t1 = fadd {_V} %{n}_t, %{n}_w",
            f"  %{n}_vo = mul i64 %{n}_c, {size}",
            f"  %{n}_v = getelementptr float, ptr %v_at, i64 %{n}_vo",
            *steps,
            f"  %{n}_c1 = add i64 %{n}_c, 1",
            f"  %{n}_more = icmp ult i64 %{n}_c1, %view",
            f"  br i1 %{n}_more, label %loop{number}, label %store{number}",
            f"store{number}:",
            *stores,
            f"  br label %{following}",
        ]
    body = "\n".join(code)
    return f"""
define void @means(ptr %out, ptr %weights, ptr %values, i64 %num, i64 %rows, i64 %view, i64 %v_n) {{
entry:
  br label %each_n
each_n:
  %n = phi i64 [0, %entry], [%n1, %end_n]
  %vo = mul i64 %n, %v_n
  %v_at = getelementptr float, ptr %values, i64 %vo
  %first = mul i64 %n, %rows
  br label %each_row
each_row:
  %r = phi i64 [0, %each_n], [%r1, %end_row]
  %row = add i64 %first, %r
  %wo = mul i64 %row, %view
  %w_at = getelementptr float, ptr %weights, i64 %wo
  %oo = mul i64 %row, {size}
  %o_at = getelementptr float, ptr %out, i64 %oo
  br label %block0
{body}
end_row:
  %r1 = add i64 %r, 1
  %more_rows = icmp ult i64 %r1, %rows
  br i1 %more_rows, label %each_row, label %end_n
end_n:
  %n1 = add i64 %n, 1
  %more_n = icmp ult i64 %n1, %num
  br i1 %more_n, label %each_n, label %done
done:
  ret void
}}
"""
