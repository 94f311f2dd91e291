"""A forward as a table of operations, run by one call: no interpreter, no dispatch between them.

Each row of the table is an operation's number and its arguments as 64-bit words. What differs from forward to forward
(the number of tokens, where segments and results lie) is written over the old words; the rest is written once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from threading import RLock
from typing import Any

import numpy as np
from llvmlite import ir

from .attention import ATTEND, STORE, write_attend, write_store
from .jit import SHARED, compile_modules, share_functions, widest_vector
from .layers import (
    ADVANCE,
    EMBED,
    GATE,
    NORMS,
    ROTATE,
    TURN,
    write_advance,
    write_embed,
    write_gate,
    write_norms,
    write_rotate,
    write_turn,
)
from .products import PRODUCT, product_name, products_text
from .sampling import GUMBEL, LEADERS, MOST_LEADERS, leaders_name, write_gumbel, write_leaders
from .weight_panels import PANELS, panels_name, write_panels
from .writer import ADDRESS, FLOAT, INTEGER, Writer

_PANEL_FORMS: list[dict[str, bool]] = [
    {"compares": compares, "gained": gained, "bfloat16": bfloat16}
    for compares in (False, True)
    for gained, bfloat16 in ((False, False), (True, False), (False, True))
]
COMMON: dict[str, Mapping[str, ir.Type]] = {
    "norms": NORMS,
    "norms_gained": NORMS,
    "rotate": ROTATE,
    "gate": GATE,
    "embed": EMBED,
    "embed_bfloat16": EMBED,
    "turn": TURN,
    "advance": ADVANCE,
    **{product_name(added=a, bfloat16=b): PRODUCT for a in (False, True) for b in (False, True)},
    **{panels_name(**form): PANELS for form in _PANEL_FORMS},
    "gumbel": GUMBEL,
    **{leaders_name(count): LEADERS for count in range(1, MOST_LEADERS + 1)},
}
"Operations for all models."
BY_HEAD_SIZE: dict[str, Mapping[str, ir.Type]] = {"store": STORE, "attend": ATTEND}
OPERATIONS = COMMON | BY_HEAD_SIZE
NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
ROW_WORDS = 1 + max(len(arguments) for arguments in OPERATIONS.values())
_CTYPES = {ADDRESS: ctypes.c_void_p, INTEGER: ctypes.c_int64, FLOAT: ctypes.c_float}


class Operation:
    """One compiled function, called by the names of its arguments (OPERATIONS): addresses, counts, numbers."""

    def __init__(self, name: str, arguments: Mapping[str, ir.Type], address: int) -> None:
        self._name, self._names = name, tuple(arguments)
        self._in_order = itemgetter(*arguments)
        self._function = ctypes.CFUNCTYPE(None, *[_CTYPES[kind] for kind in arguments.values()])(address)

    def __call__(self, **arguments: int | float) -> None:
        """Run it. Raises TypeError for an argument too many or too few: the code itself checks nothing."""
        if len(arguments) != len(self._names) or not all(name in arguments for name in self._names):
            raise TypeError(f"{self._name} takes {', '.join(self._names)}, got {', '.join(arguments)}")
        self._function(*self._in_order(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Compiled functions. Calls do not hold the interpreter's lock."""

    operations: dict[str, Operation]
    "each by itself"
    run: Callable[[int, int], None] | None = None
    "(address of a table, number of its operations); of code for a head size"
    engine: Any
    "owns the code"
    calls: Code | None = None
    "owns what it calls"


_compiling = RLock()
_common: dict[int, Code] = {}
_by_head_size: dict[tuple[int, int], Code] = {}


def common_code(width: int | None = None) -> Code:
    """Compile what serves all models for this processor, once a process: some 0.4 s.

    Args:
        width: floats in a vector of the products; the processor's widest by default. Results do not depend on it.

    Raises:
        RuntimeError: the process may not make code.
    """
    width = width or widest_vector()
    with _compiling:
        # never dropped: whoever calls an operation holds nothing else
        if width not in _common:
            _common[width] = _compile_common(width)
        return _common[width]


def _compile_common(width: int) -> Code:
    module = ir.Module()
    write_norms(module, gained=False)
    write_norms(module, gained=True)
    write_rotate(module)
    write_gate(module)
    write_embed(module, bfloat16=False)
    write_embed(module, bfloat16=True)
    write_turn(module)
    write_advance(module)
    for form in _PANEL_FORMS:
        write_panels(module, **form)
    write_gumbel(module)
    for count in range(1, MOST_LEADERS + 1):
        write_leaders(module, count)
    engine = compile_modules(products_text(width=width), str(module))
    return Code(operations=_callables(engine, COMMON), engine=engine)


def native_code(head_size: int, width: int | None = None) -> Code:
    """Compile attention for one head size, a multiple of 8, and what runs tables; once a process.

    Args:
        head_size: elements of a head.
        width: floats in a vector, as of `common_code`.

    Raises:
        RuntimeError: the process may not make code.
    """
    width = width or widest_vector()
    with _compiling:
        if (head_size, width) not in _by_head_size:
            _by_head_size[head_size, width] = _compile_for(head_size, width)
        return _by_head_size[head_size, width]


def _compile_for(head_size: int, width: int) -> Code:
    common = common_code(width)
    share_functions(common.engine, COMMON)
    module = ir.Module()
    write_store(module, head_size)
    write_attend(module, head_size, width)
    _write_run(module)
    engine = compile_modules(str(module))
    return Code(
        operations=common.operations | _callables(engine, BY_HEAD_SIZE),
        run=ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("run")),
        engine=engine,
        calls=common,
    )


def _callables(engine: Any, operations: Mapping[str, Mapping[str, ir.Type]]) -> dict[str, Operation]:
    return {
        name: Operation(name, arguments, engine.get_function_address(name))
        for name, arguments in operations.items()
    }


def _write_run(module: ir.Module) -> None:
    """`run`: call every operation of a table, in order."""
    w = Writer(module, "run", {"table": ADDRESS, "count": INTEGER})
    with w.loop(w.at["count"]) as row:
        words = w.address(w.at["table"], w.times(row.index, ROW_WORDS), INTEGER)
        number = w.load(words, INTEGER(0), INTEGER, element=INTEGER)
        done = w.function.append_basic_block()
        choice = w.ir.switch(number, done)
        for name, arguments in OPERATIONS.items():
            block = w.function.append_basic_block()
            choice.add_case(INTEGER(NUMBERS[name]), block)
            w.ir.position_at_end(block)
            function = SHARED + name if name in COMMON else name
            w.call(function, *(_argument(w, words, 1 + i, kind) for i, kind in enumerate(arguments.values())))
            w.ir.branch(done)
        w.ir.position_at_end(done)
    w.finish()


def _argument(w: Writer, words: Any, index: int, kind: ir.Type) -> Any:
    word = w.load(words, INTEGER(index), INTEGER, element=INTEGER)
    if kind == ADDRESS:
        return w.ir.inttoptr(word, ADDRESS)
    if kind == FLOAT:
        return w.ir.bitcast(w.ir.trunc(word, ir.IntType(32)), FLOAT)
    return word


class Program:
    """A table under construction, then to be run. Arguments given as text are named, and set before a run."""

    def __init__(self, code: Code) -> None:
        if code.run is None:
            raise TypeError("a program needs code for a head size: see native_code")
        self._code, self._run = code, code.run
        self._rows: list[list[int]] = []
        self._named: dict[str, list[tuple[int, int]]] = {}
        self._places: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._table = np.zeros((0, ROW_WORDS), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, operation: str, **arguments: int | float | str) -> None:
        """Append an operation with all of its arguments."""
        row = [NUMBERS[operation]] + [0] * (ROW_WORDS - 1)
        kinds = OPERATIONS[operation]
        if arguments.keys() != kinds.keys():
            raise TypeError(f"{operation} takes {', '.join(kinds)}, got {', '.join(arguments)}")
        for index, (name, kind) in enumerate(kinds.items(), start=1):
            value = arguments[name]
            if isinstance(value, str):
                self._named.setdefault(value, []).append((len(self._rows), index))
            elif kind == FLOAT:
                row[index] = struct.unpack("<i", struct.pack("<f", value))[0]
            else:
                row[index] = int(value)
        self._rows.append(row)

    def close(self) -> None:
        """Write the table; nothing is added any more."""
        self._table = np.array(self._rows, dtype=np.int64)
        self._places = {name: tuple(np.array(places).T) for name, places in self._named.items()}  # type: ignore[misc]

    def set(self, **values: int | np.ndarray) -> None:
        """Write the named arguments: one value, or one for each place in order. Raises KeyError: one is missing."""
        for name, places in self._places.items():
            self._table[places] = values[name]

    def run(self, first: int = 0, count: int | None = None) -> None:
        """Run `count` operations from the `first` on; all of them by default. Raises IndexError behind the last."""
        count = len(self._rows) - first if count is None else count
        if first < 0 or count < 1 or first + count > len(self._table):
            raise IndexError(f"operations {first} to {first + count} of a program of {len(self._table)}")
        self._run(self._table.ctypes.data + first * self._table.strides[0], count)
