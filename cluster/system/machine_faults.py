"""Errors of the machine, told apart from errors of this program: a full disk is no bug, a missing file may be one.

Standard library only: the command line loads it before anything else.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from ..ray_start.origin import PACKAGES, ROOT

_CLOSED_PIPE = 141
"128 + SIGPIPE, as a shell says it of other programs."

_ADVICE = {
    errno.ENOSPC: "free some space there, or write to a larger disk",
    errno.EDQUOT: "free some space there, or write to another disk",
    errno.EFBIG: "write to a file system that takes larger files",
    errno.EROFS: "write to another place",
    errno.EACCES: "get the right to it, or name another place",
    errno.EPERM: "get the right to it, or name another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files",
    errno.ENOMEM: "free some memory, or ask for less",
    errno.ENAMETOOLONG: "take a shorter name",
    errno.ELOOP: "fix the link that leads to itself",
    errno.EIO: "look at the disk: the machine cannot read or write it",
}
"What only the machine's owner can fix. Any other error number is for a traceback."


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFault:
    """What to print instead of a traceback, and how to end."""

    text: str
    exit_code: int = 1


def explain_os_error(error: OSError) -> MachineFault | None:
    """Describe an error that the machine is the cause of; None for all others, which may be bugs."""
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        _drop_output()
        return MachineFault(
            text="nobody reads the output any more (closed pipe); stopped", exit_code=_CLOSED_PIPE
        )
    if error.errno == errno.ENOENT and error.filename is None and not _stands_here():
        return MachineFault(
            text="the folder that this command was called in is gone (deleted, or moved away); expected one that is "
            "there: go into it again (cd)",
            exit_code=2,
        )
    if error.errno not in _ADVICE:
        return None
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    what = f"{error.strerror}: {' -> '.join(names)}" if names else str(error.strerror)
    return MachineFault(text=f"{what} (in {_raised_at(error)}); {_ADVICE[error.errno]}")


def _stands_here() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _raised_at(error: OSError) -> str:
    """File and line of ours that was the last on the way to the error."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [
        (path.relative_to(ROOT), line)
        for path, line in frames
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
    ]
    path, line = (ours or frames)[-1]
    return f"{path}:{line}"


def _nobody_reads() -> bool:
    """True when the reader of our standard output is gone; a pipe of some library may break too."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # no file behind it
        return False


def _drop_output() -> None:
    """What is still buffered goes nowhere, or Python would complain once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
