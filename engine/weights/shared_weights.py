"""Laid-out weights in memory that the instances of a machine share: a file without a folder (memfd).

It goes with the last process that has it; others find it by a link to one that has. Whoever decodes from it holds a
shared lock on it, whoever lays out another version an exclusive one: so the memory is written over where all have left
the version before, and where one goes on with that, the others have a new file. Each compares what is there with what
came to it.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import numpy as np
from torch import Tensor

from ...core.errors import WeightsError
from .digests import digest, read_only

LEAVE_S, LAY_OUT_S = 1.0, 60.0
"For others to leave the version before, or to lay the next one out; then it goes without them."
_LINE_BYTES = 64


class SharedWeights:
    """Where the tensors of a model on a CPU lie."""

    def __init__(self, folder: Path, scope: str) -> None:
        """`folder` is where links lie, `scope` tells apart who lays the same weights out otherwise."""
        self._folder, self._scope, self._file = folder, scope, -1
        self._tensors: list[Tensor] = []
        self.coming = ""
        "checksum of the version that is loaded next; where it has none, no other process will share it"

    def hold(self, tensors: list[Tensor]) -> None:
        """Take the tensors that all of a version is laid out in."""
        rounded = (-(-one.nbytes // _LINE_BYTES) * _LINE_BYTES for one in tensors)
        *self._starts, self._size = accumulate(rounded, initial=0)
        self._tensors = tensors
        self._name = f"rlhfspec-{digest(np.frombuffer(f'{self._scope} {self._size}'.encode(), np.uint8))}"

    def begin(self) -> bool:
        """Let the tensors be of the version that comes; whether it lies there: nobody writes to it then."""
        former, is_there = self._file, False
        if former >= 0:
            fcntl.flock(former, fcntl.LOCK_UN)
        try:
            self._file, is_there = self._locked() if self.coming else (-1, False)
        except OSError as error:
            logging.getLogger(__name__).warning("weights are not shared with other instances: %s", error)
            self._file = -1
        if self._file < 0 or self._file != former:
            memory = read_only(np.frombuffer(mmap.mmap(self._file, self._size), np.uint8))
            for start, one in zip(self._starts, self._tensors, strict=True):
                one.set_(memory.untyped_storage(), start // one.element_size(), one.shape, one.stride())
            if former >= 0:
                os.close(former)
        return is_there

    def end(self) -> None:
        """Say that the version lies there. Raises WeightsError: it has been written over."""
        if self._file >= 0:
            os.pwrite(self._file, self._words("whole"), self._size)
            fcntl.flock(self._file, fcntl.LOCK_SH)
            if not self._says(self._file, "whole"):
                raise WeightsError("shared weights were written over by another process; load them again")

    def give_up(self) -> None:
        """Say that what lies there is not the version: nobody else begins to decode from it."""
        if self._file >= 0:
            os.pwrite(self._file, self._words("damaged"), self._size)

    def _locked(self) -> tuple[int, bool]:
        """A file that this process may read the version from, or write it to, and which of the two."""
        file, began_s = self._linked(), time.monotonic()
        while True:
            is_there = self._says(file, "whole")
            with suppress(BlockingIOError):
                fcntl.flock(file, (fcntl.LOCK_SH if is_there else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if self._says(file, "whole") == is_there:
                    if not is_there:
                        os.pwrite(file, self._words("begun"), self._size)
                    return file, is_there
            if time.monotonic() - began_s > (LAY_OUT_S if self._says(file, "begun") else LEAVE_S):
                (self._folder / self._name).unlink(missing_ok=True)
                if file != self._file:
                    os.close(file)
                file, began_s = self._linked(is_new=True), time.monotonic()
            time.sleep(0.002)

    def _linked(self, *, is_new: bool = False) -> int:
        """The file that others find, or one that they will find."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for link in self._folder.iterdir():
            with suppress(OSError):
                if os.readlink(os.readlink(link)) == f"/memfd:{link.name} (deleted)":
                    continue
            # its process has ended, or has another file
            link.unlink(missing_ok=True)
        file, link = self._file, self._folder / self._name
        if is_new or file < 0:
            file = os.memfd_create(self._name)
            os.ftruncate(file, self._size + _LINE_BYTES)
        with suppress(FileExistsError):
            link.symlink_to(f"/proc/{os.getpid()}/fd/{file}")
            return file
        found = os.open(link, os.O_RDWR)
        if os.path.sameopenfile(found, file):
            os.close(found)
            return file
        if file != self._file:
            os.close(file)
        return found

    def _says(self, file: int, state: str) -> bool:
        """Whether that is said of the version, behind the weights."""
        return os.pread(file, _LINE_BYTES, self._size) == self._words(state)

    def _words(self, state: str) -> bytes:
        return f"{self.coming} {state}".encode().ljust(_LINE_BYTES)
