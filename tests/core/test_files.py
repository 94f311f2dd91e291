"""Files and folders are whole or not there, whichever write fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rlhfspec.core import files
from rlhfspec.core.errors import StorageError
from rlhfspec.core.files import append_whole, recover_folder, storage_errors, whole_folder, write_whole


class FullDisk:
    """Lets `room` calls of one function of `os` pass, then says that the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, room: int) -> None:
        self.calls = 0
        really = getattr(os, name)

        def call(*args, **kwargs):
            self.calls += 1
            if self.calls > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return really(*args, **kwargs)

        monkeypatch.setattr(files.os, name, call)


def short_writes(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """A disk that takes a byte a call, `room` in all."""
    really, left = os.write, [room]

    def write(file: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return really(file, bytes(data[:1]))

    monkeypatch.setattr(files.os, "write", write)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("room", range(4))
def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path, monkeypatch, room):
    write_whole(tmp_path / "f", "old")
    short_writes(monkeypatch, room)
    if room < 3:
        with pytest.raises(StorageError, match=r"cannot write .*f: .*No space left on device.* bytes free"):
            write_whole(tmp_path / "f", "new")
    else:
        write_whole(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == ("new" if room == 3 else "old")
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("room", range(3))
def test_a_line_is_appended_whole_or_not_at_all(tmp_path, monkeypatch, room):
    append_whole(tmp_path / "f", "a\n")
    short_writes(monkeypatch, room)
    for name, before in (("f", "a\n"), ("new", "")):
        if room < 2:
            with pytest.raises(StorageError):
                append_whole(tmp_path / name, "b\n")
            assert not before or (tmp_path / name).read_text() == before
            assert (tmp_path / name).exists() == bool(before)
        else:
            append_whole(tmp_path / "f", "b\n")
            assert (tmp_path / "f").read_text() == "a\nb\n"
            return


def fill(folder: Path, text: str) -> None:
    with whole_folder(folder) as partial:
        write_whole(partial / "a", text)
        (partial / "sub").mkdir()
        write_whole(partial / "sub" / "b", text)


@pytest.mark.parametrize("function", ["write", "fsync", "replace"])
def test_whichever_call_fails_the_folder_is_the_old_one_or_the_new_one(tmp_path, monkeypatch, function):
    folder = tmp_path / "target"
    with monkeypatch.context() as patch:
        enough = FullDisk(patch, function, 10**6)
        fill(folder, "count")
    assert enough.calls >= 2
    failed = 0
    for room in range(enough.calls + 1):
        fill(folder, "old")
        with monkeypatch.context() as patch:
            FullDisk(patch, function, room)
            try:
                fill(folder, "new")
            except StorageError:
                failed += 1
                assert (folder / "a").read_text() == (folder / "sub" / "b").read_text() == "old"
            else:
                assert (folder / "a").read_text() == (folder / "sub" / "b").read_text() == "new"
        assert names(tmp_path) == ["target"]
    # names are made durable where it can be done: those calls may fail
    assert failed >= 2 and (folder / "a").read_text() == "new"


def test_a_first_folder_that_fails_leaves_nothing(tmp_path, monkeypatch):
    FullDisk(monkeypatch, "write", 1)
    with pytest.raises(StorageError):
        fill(tmp_path / "target", "new")
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["old away", "new in"])
def test_a_crash_between_the_renames_loses_neither_folder(tmp_path, monkeypatch, step):
    folder = tmp_path / "target"
    fill(folder, "old")

    class Crash(BaseException):
        pass

    really = Path.rename

    def rename(self: Path, to: Path) -> Path:
        done = really(self, to)
        if (to == folder) == (step == "new in"):
            raise Crash
        return done

    def gone(*_: object, **__: object) -> None:
        """A dead process cleans nothing up."""

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr(files, "recover_folder", gone)
        patch.setattr(files.shutil, "rmtree", gone)
        with pytest.raises(Crash):
            fill(folder, "new")
    assert (folder.exists(), (tmp_path / ".replaced-target").exists()) == (step == "new in", True)
    recover_folder(folder)
    assert (folder / "a").read_text() == ("new" if step == "new in" else "old")
    assert not (tmp_path / ".replaced-target").exists()
    fill(folder, "newer")
    assert names(tmp_path) == ["target"] and (folder / "a").read_text() == "newer"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "x"), "No space left on device.*free space there or set run.output_dir"),
        (OSError(errno.EDQUOT, "x"), "quota exceeded.*free space there"),
        (OSError(errno.EFBIG, "x"), "File too large.*ulimit -f"),
        (OSError(errno.ENOENT, "x"), "No such file.*still there"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_disk_says_is_one_line_with_advice(tmp_path, error, says):
    refused = pytest.raises(StorageError, match=f"cannot write .*/f: expected room for it, got '.*{says}")
    with refused as caught, storage_errors(tmp_path / "sub" / "f"):
        raise error
    assert "\n" not in str(caught.value) and caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("error", "only_known"),
    [(ValueError("x"), False), (OSError("no number"), False), (OSError(errno.ENOENT, "x"), True)],
    ids=str,
)
def test_other_errors_stay_what_they_are(tmp_path, error: Exception, only_known: bool):
    def fail() -> None:
        with storage_errors(tmp_path, only_known=only_known):
            raise error

    check: Callable[[], None] = fail
    with pytest.raises(type(error)) as caught:
        check()
    assert caught.value is error
