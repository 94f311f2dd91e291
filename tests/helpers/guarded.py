"""Buffers between pages that nobody may touch: one byte read or written beside them ends the process."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
_NOTHING, _BOTH, _PRIVATE_ANONYMOUS = (
    0,
    mmap.PROT_READ | mmap.PROT_WRITE,
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(values: np.ndarray, *, at_end: bool) -> np.ndarray:
    """Return a copy of the values whose last byte (or first, unless `at_end`) lies beside a forbidden page."""
    values = np.ascontiguousarray(values)
    inside = -(-values.nbytes // PAGE) * PAGE
    start = _libc.mmap(None, inside + 2 * PAGE, _BOTH, _PRIVATE_ANONYMOUS, -1, 0)
    assert start not in (None, ctypes.c_void_p(-1).value), "no memory"
    for page in (start, start + PAGE + inside):
        assert _libc.mprotect(page, PAGE, _NOTHING) == 0
    address = start + PAGE + (inside - values.nbytes if at_end else 0)
    memory = (ctypes.c_char * values.nbytes).from_address(address)
    copy = np.frombuffer(memory, dtype=values.dtype).reshape(values.shape)
    copy[...] = values
    return copy
