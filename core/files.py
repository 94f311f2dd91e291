"""Files and folders that are whole or not there: made beside under a partial name, synced, renamed.

A line is appended whole or not at all. A disk that is full or refuses is one StorageError that says what, how
much room there is, and what to do.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import StorageError

PARTIAL = ".partial-"
"Begins the name of what is still being written; whoever wrote it is dead if it stays."
REPLACED = ".replaced-"
"Begins the name of a folder for the moment in which another takes its place."

_FREE_SPACE = "free space there or set run.output_dir to a larger disk, and start again"
_ADVICE = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "set run.output_dir to a place you may write to",
    errno.EIO: "look at the disk's health in the system's log",
}
_OTHER_ADVICE = "see that the folder is still there and may be written to"
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")


def partial_of(path: Path) -> Path:
    """What a file or folder is called until it is whole."""
    return path.with_name(PARTIAL + path.name)


def write_whole(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Write a file whole or not at all; until it is whole, what was there before stays.

    Not `durable`: it may be lost when the machine fails, and costs no wait for the disk.
    Raises StorageError.
    """
    partial = partial_of(path)
    try:
        with storage_errors(path):
            with partial.open("wb", buffering=0) as file:
                _write_all(file.fileno(), _bytes(data))
                if durable:
                    os.fsync(file.fileno())
            os.replace(partial, path)
            if durable:
                _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def append_whole(path: Path, data: bytes | str) -> None:
    """Append all of `data` or nothing. Raises StorageError."""
    with storage_errors(path), path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            _write_all(file.fileno(), _bytes(data))
        except BaseException:
            file.truncate(size)
            if not size:
                path.unlink(missing_ok=True)
            raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder beside `folder` to be filled; when the block ends well it takes the place of `folder`.

    There is no moment without the old one or the new one on disk: between two renames the old one is called
    `.replaced-NAME`, and `recover_folder` puts it back after a crash. Raises StorageError; then the old one stays.
    """
    partial = partial_of(folder)
    recover_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with storage_errors(folder):
            partial.mkdir(parents=True)
            yield partial
            _sync_tree(partial)
            _take_place(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(_replaced(folder), ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Let a folder go: whoever is killed meanwhile leaves what a later run removes, and no half one.

    Raises StorageError.
    """
    doomed = partial_of(folder)
    with storage_errors(folder):
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def recover_folder(folder: Path) -> None:
    """Undo a replacement that a crash cut short; for the one who writes there, or once that one is dead."""
    replaced = _replaced(folder)
    if not replaced.is_dir():
        return
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        replaced.rename(folder)


@contextmanager
def storage_errors(path: Path, *, only_known: bool = False) -> Iterator[None]:
    """Turn what the system or a library says while `path` is written into one StorageError.

    `only_known` leaves everything alone that is not surely of the disk: a full one, a quota, a damaged one.
    """
    try:
        yield
    except Exception as error:
        number = _errno(error)
        if number is None or (only_known and not (isinstance(error, OSError) and number in _ADVICE)):
            raise
        raise StorageError(
            f"cannot write {path}: expected room for it, got '{os.strerror(number)}' with {_free_bytes(path)} "
            f"bytes free there; {_ADVICE.get(number, _OTHER_ADVICE)} (what was finished before is kept)"
        ) from error


def _errno(error: Exception) -> int | None:
    """The system's number for it; libraries in Rust (safetensors) have it in their text alone."""
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_ERRNO.search(str(error))
    return int(match[1]) if match else None


def _free_bytes(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return f"{shutil.disk_usage(path).free:,}"
    except OSError:
        return "an unknown number of"


def _take_place(partial: Path, folder: Path) -> None:
    replaced = _replaced(folder)
    if folder.exists():
        folder.rename(replaced)
    try:
        partial.rename(folder)
    except BaseException:
        recover_folder(folder)
        raise
    _sync_folder(folder.parent)


def _replaced(folder: Path) -> Path:
    return folder.with_name(REPLACED + folder.name)


def _bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync_folder(path) if path.is_dir() else _sync_file(path)
    _sync_folder(folder)


def _sync_file(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(folder: Path) -> None:
    """Make names durable, where the file system can."""
    with suppress(OSError):
        _sync_file(folder)
