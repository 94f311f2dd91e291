"""Writes functions in LLVM IR: addresses and sizes come in, counted loops run over vectors of eight floats.

Nothing here allows a compiler to reorder sums: what is written is what is rounded, on every processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

from llvmlite import ir

from ..attention.backends import LOG2_E
from ..cache.kv_pool import CELL_STEP

WIDTH = CELL_STEP
"Floats in a vector, on every processor: the order of a sum over a row depends on it. Cells are whole vectors."
ADDRESS, INTEGER, FLOAT = ir.PointerType(), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, WIDTH)
WORDS = ir.VectorType(ir.IntType(32), WIDTH)

EXP2 = (
    0.6931472028552759,
    0.2402264791359781,
    0.055503324707933274,
    0.009618437359798115,
    0.0013398874519234029,
    0.0001535336158634236,
)
"2^x - 1 for |x| <= 1/2 is x times this polynomial, to 2e-9 of 2^x (fitted with equal ripples)."
LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
"ln(1 + f) = f - f^2 / 2 + f^3 times this polynomial for sqrt(1/2) <= 1 + f < sqrt(2) (S. Moshier, Cephes, logf)."
LN2_PARTS = (0.693359375, -2.12194440e-4)
"The first has few bits: its product with an exponent is exact."
SMALLEST_POWER, LARGEST_POWER = -126.0, 128.0
_MERGES = (
    ((0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)),
    ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
    ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
)
"Lanes taken of two vectors: after three merges of pairs every lane is the sum of one of eight vectors."
MINUS_INFINITY = float("-inf")


class Writer:
    """The body of one function; `finish` ends it. Attributes `a_name` are its arguments."""

    def __init__(self, module: ir.Module, name: str, arguments: Mapping[str, ir.Type]) -> None:
        kind = ir.FunctionType(ir.VoidType(), list(arguments.values()))
        self.function = ir.Function(module, kind, name)
        self.at = dict(zip(arguments, self.function.args, strict=True))
        self.ir = ir.IRBuilder(self.function.append_basic_block())
        self._module = module

    def finish(self) -> None:
        """Return from the function."""
        self.ir.ret_void()

    def call(self, name: str, *values: Any) -> None:
        """Call a function that another module of the same program defines or this one has written."""
        function = self._module.globals.get(name) or ir.Function(
            self._module, ir.FunctionType(ir.VoidType(), [value.type for value in values]), name
        )
        self.ir.call(function, values)

    @contextmanager
    def loop(self, count: Any, *, step: Any = 1, start: Sequence[Any] = ()) -> Iterator[Loop]:
        """Run the block for index 0, step, .. below `count`, which is at least 1. `start` is carried along."""
        before = self.ir.block
        body = self.function.append_basic_block()
        self.ir.branch(body)
        self.ir.position_at_end(body)
        index = self.ir.phi(INTEGER)
        index.add_incoming(INTEGER(0), before)
        carried = [self.ir.phi(value.type) for value in start]
        loop = Loop(index, carried)
        yield loop
        end, after = self.ir.block, self.function.append_basic_block()
        following = self.ir.add(index, INTEGER(step) if isinstance(step, int) else step)
        index.add_incoming(following, end)
        for phi, first, next_value in zip(carried, start, loop.values, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(next_value, end)
        self.ir.cbranch(self.ir.icmp_signed("<", following, count), body, after)
        self.ir.position_at_end(after)

    @contextmanager
    def if_any(self, count: Any) -> Iterator[None]:
        """Run the block where a count is above 0: a loop over it runs at least once."""
        with self.ir.if_then(self.ir.icmp_signed(">", count, INTEGER(0))):
            yield

    def in_vectors(self, count: Any, width: int) -> list[tuple[int, Any, Any]]:
        """Cut a multiple of WIDTH floats: (lanes, first, number) of what fills wide vectors, and of the rest."""
        if width == WIDTH:
            return [(WIDTH, INTEGER(0), count)]
        wide = self.ir.and_(count, INTEGER(-width))
        return [(width, INTEGER(0), wide), (WIDTH, wide, self.ir.sub(count, wide))]

    def alloca(self, count: Any) -> Any:
        """Return the address of so many floats that last as long as the call; to be asked for outside loops."""
        # by way of an integer: a pointer to floats, which it is at first, could not hold a vector
        return self.ir.inttoptr(self.ir.ptrtoint(self.ir.alloca(FLOAT, size=count), INTEGER), ADDRESS)

    def sum(self, *parts: Any) -> Any:
        """Return the sum of integers."""
        return reduce(self.ir.add, parts)

    def times(self, *factors: Any) -> Any:
        """Return the product of integers, some of which may be Python's."""
        return reduce(self.ir.mul, [INTEGER(x) if isinstance(x, int) else x for x in factors])

    def address(self, base: Any, offset: Any, kind: ir.Type = FLOAT) -> Any:
        """Return the address of an element."""
        return self.ir.gep(base, [offset], source_etype=kind)

    def zeros(self, count: int) -> Any:
        """Return the address of so many zeros."""
        name = f"zeros_{count}"
        if name not in self._module.globals:
            kind = ir.ArrayType(FLOAT, count)
            variable: Any = ir.GlobalVariable(self._module, kind, name)
            variable.initializer = ir.Constant(kind, None)
            variable.global_constant, variable.linkage = True, "internal"
        return self._module.globals[name]

    def load(self, base: Any, offset: Any, kind: ir.Type = VECTOR, *, element: ir.Type = FLOAT) -> Any:
        """Load from an offset in elements; alignment is that of a float."""
        return self.ir.load(self.address(base, offset, element), typ=kind, align=4)

    def load_bfloat16(self, base: Any, offset: Any) -> Any:
        """Load a vector of bfloat16 as floats, whose upper halves they are."""
        short = ir.IntType(16)
        halves = self.ir.load(self.address(base, offset, short), typ=ir.VectorType(short, WIDTH), align=2)
        return self.ir.bitcast(self.ir.shl(self.ir.zext(halves, WORDS), self.words(16)), VECTOR)

    def store(self, value: Any, base: Any, offset: Any) -> None:
        """Store at an offset in floats."""
        self.ir.store(value, self.address(base, offset), align=4)

    def copy(self, target: Any, source: Any, count: Any) -> None:
        """Copy a multiple of WIDTH floats."""
        with self.loop(count, step=WIDTH) as loop:
            self.store(self.load(source, loop.index), target, loop.index)

    def splat(self, value: Any, lanes: int = WIDTH) -> Any:
        """Return a vector of one value; a Python number is a constant."""
        kind = ir.VectorType(FLOAT, lanes)
        if isinstance(value, float):
            return ir.Constant(kind, [value] * lanes)
        one = self.ir.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
        return self.shuffle(one, one, [0] * lanes)

    def first(self, x: Any) -> Any:
        """Return a vector's first lane."""
        return self.ir.extract_element(x, ir.IntType(32)(0))

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Take lanes of two vectors behind one another."""
        return self.ir.shuffle_vector(a, b, ir.Constant(_words(len(lanes)), list(lanes)))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a b + c, rounded once."""
        return self._intrinsic("llvm.fma", a, b, c)

    def sqrt(self, x: Any) -> Any:
        """Return the square root, correctly rounded."""
        return self._intrinsic("llvm.sqrt", x)

    def larger(self, a: Any, b: Any) -> Any:
        """Return the larger value of each lane: b where one of them is NaN."""
        return self.ir.select(self.ir.fcmp_ordered(">", a, b), a, b)

    def sum_of_each(self, vectors: Sequence[Any]) -> Any:
        """Return the vector of eight vectors' sums; each is (01 + 23) + (45 + 67) of its lanes.

        Longer vectors hold several groups of eight lanes: each gives eight sums of its own.
        """
        lanes = vectors[0].type.count
        for merge in _MERGES:
            lower, upper = (_in_groups(half, lanes) for half in merge)
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.ir.fadd(self.shuffle(a, b, lower), self.shuffle(a, b, upper)) for a, b in pairs]
        return vectors[0]

    def across(self, combine: Any, x: Any) -> Any:
        """Combine the lanes pairwise; every lane of the result holds the whole."""
        for half in (4, 2, 1):
            x = combine(x, self.shuffle(x, x, [lane ^ half for lane in range(WIDTH)]))
        return x

    def exp2(self, x: Any) -> Any:
        """Return 2^x to about one unit in the last place; 0 below 2^-126 and at -inf, 1 at 0, inf from 2^127.5 on."""
        lanes = x.type.count
        # comparisons are so arranged that a NaN stays one
        bounded = self.larger(self.splat(SMALLEST_POWER, lanes), x)
        limit = self.splat(LARGEST_POWER, lanes)
        bounded = self.ir.select(self.ir.fcmp_ordered(">", bounded, limit), limit, bounded)
        whole = self._intrinsic("llvm.rint", bounded)
        rest = self.ir.fsub(bounded, whole)
        polynomial = self.splat(EXP2[-1], lanes)
        for coefficient in reversed(EXP2[:-1]):
            polynomial = self.fma(polynomial, rest, self.splat(coefficient, lanes))
        fraction = self.fma(polynomial, rest, self.splat(1.0, lanes))
        exponent = self.ir.shl(
            self.ir.add(self.ir.fptosi(whole, _words(lanes)), self.words(127, lanes)),
            self.words(23, lanes),
        )
        power = self.ir.fmul(fraction, self.ir.bitcast(exponent, x.type))
        return self.ir.select(
            self.ir.fcmp_ordered("<", x, self.splat(SMALLEST_POWER, lanes)), self.splat(0.0, lanes), power
        )

    def tanh(self, x: Any) -> Any:
        """Return the hyperbolic tangent, to 2e-7."""
        one = self.splat(1.0)
        power = self.exp2(self.ir.fmul(x, self.splat(2.0 * LOG2_E)))
        return self.ir.fsub(one, self.ir.fdiv(self.splat(2.0), self.ir.fadd(power, one)))

    def log(self, x: Any) -> Any:
        """Return the natural logarithm of positive normal floats, to about one unit in the last place."""
        bits = self.ir.bitcast(x, WORDS)
        exponent = self.ir.sub(self.ir.lshr(bits, self.words(23)), self.words(126))
        mantissa = self.ir.or_(self.ir.and_(bits, self.words(0x007FFFFF)), self.words(0x3F000000))
        fraction = self.ir.bitcast(mantissa, VECTOR)
        small = self.ir.fcmp_ordered("<", fraction, self.splat(0.5**0.5))
        fraction = self.ir.select(small, self.ir.fadd(fraction, fraction), fraction)
        exponent = self.ir.select(small, self.ir.sub(exponent, self.words(1)), exponent)
        f, power = self.ir.fsub(fraction, self.splat(1.0)), self.ir.sitofp(exponent, VECTOR)
        square = self.ir.fmul(f, f)
        polynomial = self.splat(LOG[0])
        for coefficient in LOG[1:]:
            polynomial = self.fma(polynomial, f, self.splat(coefficient))
        rest = self.ir.fmul(self.ir.fmul(polynomial, f), square)
        rest = self.fma(power, self.splat(LN2_PARTS[1]), rest)
        rest = self.fma(square, self.splat(-0.5), rest)
        return self.fma(power, self.splat(LN2_PARTS[0]), self.ir.fadd(f, rest))

    def words(self, value: int, lanes: int = WIDTH) -> Any:
        """Return a vector of one 32-bit integer."""
        return ir.Constant(_words(lanes), [value - (value >> 31 << 32)] * lanes)

    def _intrinsic(self, name: str, *values: Any) -> Any:
        kind = values[0].type
        name = f"{name}.v{kind.count}f32"
        function = self._module.globals.get(name) or ir.Function(
            self._module, ir.FunctionType(kind, [kind] * len(values)), name
        )
        return self.ir.call(function, values)


def _words(lanes: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(32), lanes)


def _in_groups(taken: Sequence[int], lanes: int) -> list[int]:
    """Lanes taken of two longer vectors, of each group of eight what `taken` says of two vectors of eight."""
    return [
        group + (lane if lane < WIDTH else lanes + lane - WIDTH)
        for group in range(0, lanes, WIDTH)
        for lane in taken
    ]


class Loop:
    """A loop's index and what it carries: set `values` to what the next round, or the code behind it, shall find."""

    def __init__(self, index: Any, values: list[Any]) -> None:
        self.index = index
        self.values = values
