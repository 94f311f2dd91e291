"""What comes from outside and may be anything: paths that are none, values too long to quote."""

from __future__ import annotations

import os
import reprlib
import tempfile
from pathlib import Path
from typing import Any

from .errors import ConfigError

MAX_QUOTED_CHARS = 80
_LONGEST_POINTER = 1024
is_file, is_dir = os.path.isfile, os.path.isdir
"A name that the system refuses (too long, a NUL) is none; pathlib raises."


_UNSEEN = (
    *(code for code in range(0xA0) if (code < 0x20 or code >= 0x7F) and chr(code) not in "\n\t"),
    *(0x2028, 0x2029),  # ends of a line to some
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),  # turn the order of letters round
    *range(0xD800, 0xE000),
)
_VISIBLE = {code: f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}" for code in _UNSEEN}
"As in JSON, so that text that is JSON stays so; what is below 0x20 stands escaped in it already."


class _Repr(reprlib.Repr):
    """A value in at most a line: a few items, two levels, the ends of long words and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = 4
        self.maxstring = self.maxother = MAX_QUOTED_CHARS

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write integers of more than 4,300 digits."""
        return repr(x) if x.bit_length() < 256 else f"an integer of {x.bit_length():,} bits"


_repr = _Repr()


def quote(value: Any) -> str:
    """Return a value's repr, shortened."""
    return _repr.repr(value)


def visible(text: str) -> str:
    """Return text of a model or a file as it may be shown: what a terminal would obey is written out in hex.

    Lines and tabs stay, and so does every letter.
    """
    return text.translate(_VISIBLE)


def cut(text: str) -> str:
    """Return `text`, or both ends of a long one."""
    if len(text) <= MAX_QUOTED_CHARS:
        return text
    half = MAX_QUOTED_CHARS // 2
    return f"{text[:half]}...{text[-half:]}"


def is_lfs_pointer(path: Path) -> bool:
    """True for what Git LFS leaves in a large file's place where it was not fetched."""
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST_POINTER:
            return False
        return path.read_bytes().startswith(b"version https://git-lfs.github.com/spec/")
    except (OSError, ValueError):
        return False


def try_folder(folder: Path) -> None:
    """Make and delete a folder where `folder` is or will be: rights alone do not tell. Raises OSError."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    os.rmdir(tempfile.mkdtemp(prefix=".rlhfspec-", dir=there))


def user_path(text: str) -> Path:
    """A path given by the user, `~` and `~user` resolved. Raises ConfigError for a home that is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"the home folder that '{text}' begins with is not known; give the whole path"
        ) from None
