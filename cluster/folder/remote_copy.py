"""A copy of the run folder at another place (`run.copy_to`), brought up to date whenever a new state stands.

For machines whose disk goes with them: `rlhfspec train --resume URL` brings the folder back. Any URL that fsspec knows.
A thread of its own copies, so that the loop waits for nothing; what cannot be copied is a note, and tried again.
What was sent is noted in the folder, so that a resumed run sends the rest only, and removes what it does not have.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ...core.checkpoint_manifest import MANIFEST
from ...core.errors import ConfigError, StorageError, describe_error
from ...core.files import PARTIAL, storage_errors, whole_folder, write_whole
from ...core.outside import try_folder
from .layout import RunDir, of_run
from .owner import FOLDER

_LOOK_S = 2.0
_OWNER_LOOK_S = 30.0
SENT_FILE = "remote_copy.json"
_NOT_COPIED = ("live.json", "logs", "traces", SENT_FILE)
"Of the machine and the moment."
_LAST_PASS_S = 600.0
_LAST_PASS_OF_A_STOPPED_RUN_S = 15.0
"Kubernetes ends a pod 30 s after SIGTERM."
_Stamp = tuple[int, int]
"Size and time of change of a file."
_VERSIONS = (
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
"What file systems tell of a file that was written again, the surest first; the whole answer has times of reading too."


def is_url(place: str) -> bool:
    """Whether a place names another file system, as `s3://bucket/runs`."""
    return "://" in place


class RemoteCopy:
    """Of one run folder."""

    def __init__(self, run_dir: RunDir, place: str, note: Callable[[str], None]) -> None:
        """Raises ConfigError where no library for such a URL is installed."""
        self._run_dir, self._note = run_dir, note
        self.url = f"{place.rstrip('/')}/{run_dir.path.name}"
        self._fs, self._root = _file_system(self.url)
        self._sent: dict[str, _Stamp] = {}
        self._leftovers: set[str] = set()
        self._has_begun = False
        self._last_fault = ""

    def bring_up_to_date(self) -> bool:
        """Copy what is new or changed, remove what has gone; whether all of it went well.

        A folder's manifest goes last and leaves first: half a checkpoint has none, and is not taken for one.
        """
        try:
            if not self.is_own():
                return False
            if not self._has_begun:
                self._begin()
            here = self._files()
            if "config.yaml" not in here:
                raise StorageError(
                    f"expected a run in {self._run_dir.path}, and config.yaml is gone from it; the copy stays as it is"
                )
            gone = (self._sent.keys() | self._leftovers) - here.keys()
            for name in sorted(gone, key=_manifests_last, reverse=True):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(f"{self._root}/{name}")
                self._sent.pop(name, None)
            self._leftovers = set()
            asked_s = time.monotonic()
            for name in sorted(here, key=_manifests_last):
                if self._sent.get(name) == here[name]:
                    continue
                if time.monotonic() - asked_s > _OWNER_LOOK_S:
                    # a large state takes minutes, in which another may begin
                    asked_s = time.monotonic()
                    if not self.is_own():
                        return False
                self._send(name, here[name])
            with suppress(Exception):
                # without the note it is sent again
                _note_sent(self._run_dir.path, self.url, self._sent, _there(self._fs, self._root))
        except Exception as error:  # whatever the file system's library raises
            fault = _one_line(error)
            if fault != self._last_fault:
                self._note(f"the copy at {self.url} is not up to date: {fault}; it is tried again")
            self._last_fault = fault
            return False
        return True

    def claim(self) -> None:
        """Write this process' name there, before anything else, so that one that was taken for gone sees it."""
        name = self._run_dir.owner.name
        if name is not None and (self._run_dir.path / name).is_file() and self.is_own():
            self._send(name, self._files()[name])

    def is_own(self) -> bool:
        """Whether no other process has begun to copy there; the run is this one's no more, then."""
        owner = self._run_dir.owner
        if owner.name is None:
            return True
        names = _owners_there(self._fs, self._root)
        own = owner.name.rpartition("/")[2]
        is_other = (
            own in names and self._fs.cat_file(f"{self._root}/{owner.name}").decode().strip() != owner.text
        )
        if is_other or any(name > own for name in names):
            owner.lose(f"another process, which copies it to {self.url}")
        return not owner.is_taken

    def _begin(self) -> None:
        """Learn what an earlier process of the run has sent, as far as it is there; nothing where the copy is new."""
        sent = _read_sent(self._run_dir.path, self.url)
        if sent is None:
            _note_sent(self._run_dir.path, self.url, {}, {})
        else:
            there = _there(self._fs, self._root)
            self._sent = {name: stamp for name, (stamp, key) in sent.items() if there.get(name) == key}
            self._leftovers = {name for name in there if not name.startswith(f"{FOLDER}/")}
        self._has_begun = True

    def _files(self) -> dict[str, _Stamp]:
        files = ((path.relative_to(self._run_dir.path), path) for path in self._run_dir.path.rglob("*"))
        return {
            name.as_posix(): _stamp(path)
            for name, path in files
            if name.parts[0] not in _NOT_COPIED
            and not any(part.startswith(PARTIAL) for part in name.parts)
            and path.is_file()
        }

    def _send(self, name: str, stamp: _Stamp) -> None:
        try:
            to = f"{self._root}/{name}"
            self._fs.makedirs(to.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(self._run_dir.path / name), to)
            self._sent[name] = stamp
        except FileNotFoundError:
            # an old state that was let go meanwhile
            if (self._run_dir.path / name).exists():
                raise


@contextmanager
def copying(run_dir: RunDir, place: str | None, note: Callable[[str], None]) -> Iterator[None]:
    """Keep a copy while the block runs, and once more when it has ended, however it has. Raises ConfigError at once."""
    if place is None:
        yield
        return
    copy = RemoteCopy(run_dir, place, note)
    ended = threading.Event()

    def go() -> None:
        seen: set[Path] = set()
        asked_s = time.monotonic()
        with suppress(Exception):
            # the first pass does it again, and tells what is wrong
            copy.claim()
        while not ended.wait(_LOOK_S):
            states = {path.parent for path in run_dir.path.glob(f"checkpoints/state_*/{MANIFEST}")}
            if states != seen and copy.bring_up_to_date():
                seen = states
            elif time.monotonic() - asked_s > _OWNER_LOOK_S:
                asked_s = time.monotonic()
                with suppress(Exception):
                    # out of reach for now
                    copy.is_own()
        copy.bring_up_to_date()

    thread = threading.Thread(target=go, name="remote-copy", daemon=True)
    thread.start()
    limit_s = _LAST_PASS_S
    try:
        yield
    except SystemExit:
        limit_s = _LAST_PASS_OF_A_STOPPED_RUN_S
        raise
    finally:
        ended.set()
        began_s = time.monotonic()
        thread.join(timeout=limit_s)
        if thread.is_alive():
            note(f"the copy at {copy.url} was not finished within {time.monotonic() - began_s:.0f} s")


def fetch_run(url: str, base: Path, note: Callable[[str], None]) -> Path:
    """Bring a copied run folder to `base`.

    One of its name that is there already is left as it is, unless another machine has gone on with the copy since:
    then it is moved aside. Raises ConfigError: no run there, no library for such a URL, StorageError.
    """
    folder = base / url.rstrip("/").rpartition("/")[2]
    fs, root = _file_system(url.rstrip("/"))
    if folder.exists():
        if not _is_behind(folder, fs, root):
            note(f"{folder} is there already: the run goes on from it, not from {url}")
            return folder
        aside = folder.with_name(f".behind-{folder.name}-{uuid.uuid4().hex[:6]}")
        with storage_errors(folder):
            folder.rename(aside)
        note(f"another machine has gone on with {url} since: what was here is now {aside}")
    try:
        there = _there(fs, root)
    except Exception as error:  # whatever the file system's library raises
        raise ConfigError(f"cannot read {url}: {_one_line(error)}; check the URL and your access") from error
    if "config.yaml" not in there:
        raise ConfigError(
            f"{url} holds no run: expected the folder of one, as run.copy_to makes it, with a config.yaml"
        )
    note(f"fetching {len(there)} files from {url}")
    with whole_folder(folder) as partial:
        for name in there:
            # a local file system makes no folder by itself
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(f"{root}/{name}", str(partial / name))
        sent = {name: _stamp(partial / name) for name in there}
        _note_sent(partial, url.rstrip("/"), sent, there)
    return folder


def fetch_newest(place: str, run_name: str, base: Path, note: Callable[[str], None]) -> None:
    """Bring the newest copied run of a name to `base`, where that has none so new. Raises as `fetch_run`."""
    fs, root = _file_system(place.rstrip("/"))
    try:
        names = [str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)]
    except FileNotFoundError:
        return
    except Exception as error:  # whatever the file system's library raises
        raise ConfigError(
            f"cannot read {place}: {_one_line(error)}; check run.copy_to and your access"
        ) from error
    here = [path.name for path in base.iterdir()] if base.is_dir() else []
    newest = of_run([*names, *here], run_name)[:1]
    if newest and newest[0] in names:
        fetch_run(f"{place.rstrip('/')}/{newest[0]}", base, note)


def _is_behind(folder: Path, fs: Any, root: str) -> bool:
    """Whether the copy of a run has owners that its folder here does not know."""
    last = max(_owners_there(fs, root), default=None)
    if last is None:
        return False
    here = folder / FOLDER / last
    return not here.is_file() or here.read_bytes() != fs.cat_file(f"{root}/{FOLDER}/{last}")


def _owners_there(fs: Any, root: str) -> set[str]:
    """Names of the owners' files of a copy, as they are now."""
    folder = f"{root}/{FOLDER}"
    fs.invalidate_cache(folder)
    if not fs.exists(folder):
        return set()
    return {str(path).rpartition("/")[2] for path in fs.ls(folder, detail=False)}


def require_place(place: str, run: Path) -> None:
    """Raise ConfigError where no copy of the run folder can be kept.

    That is: no such library, the run folder itself, a folder that can never be written. What another file system allows
    is seen when it is written.
    """
    fs, root = _file_system(f"{place.rstrip('/')}/{run.name}")
    if "file" not in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        return
    to, own = Path(root).resolve(), run.resolve()
    if to == own or own in to.parents or to in own.parents:
        raise ConfigError(
            f"run.copy_to {place} would copy the run folder {run} into itself; expected a place beside "
            f"run.output_dir. To bring a copy back, give it as a URL: --resume file://{own}"
        )
    try:
        try_folder(to)
    except OSError as error:
        raise ConfigError(
            f"run.copy_to {place}: no folder can be made there: {error.strerror}; name a place that you may write to"
        ) from None


def _one_line(error: Exception) -> str:
    """A library's error, which may be several paragraphs."""
    return " ".join(describe_error(error).split())


def _manifests_last(name: str) -> tuple[bool, str]:
    return name.endswith(MANIFEST), name


def _stamp(path: Path) -> _Stamp:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _there(fs: Any, root: str) -> dict[str, str]:
    """Size and version of every file below a folder of the file system, by its name there."""
    fs.invalidate_cache()
    return {
        PurePosixPath(name).relative_to(PurePosixPath(root)).as_posix(): _version(info)
        for name, info in fs.find(root, detail=True).items()
    }


def _version(info: Mapping[str, Any]) -> str:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return f"{info.get('size')} {version}"


def _note_sent(folder: Path, url: str, sent: Mapping[str, _Stamp], there: Mapping[str, str]) -> None:
    """Write down what the copy has, and as what it is known there. Raises StorageError."""
    known = {name: [*stamp, there[name]] for name, stamp in sent.items() if name in there}
    write_whole(folder / SENT_FILE, json.dumps({"url": url, "sent": known}) + "\n", durable=False)


def _read_sent(folder: Path, url: str) -> dict[str, tuple[_Stamp, str]] | None:
    """What was written down of a copy at this place; None where there is no such note."""
    try:
        tree = json.loads((folder / SENT_FILE).read_text())
        if tree["url"] != url:
            return None
        return {
            name: ((int(size), int(changed)), str(key)) for name, (size, changed, key) in tree["sent"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be used: {' '.join(str(error).split())}; expected a folder, or a URL whose fsspec library "
            "is installed, such as s3fs for s3:// and gcsfs for gs://"
        ) from error
    return fs, str(root).rstrip("/")
