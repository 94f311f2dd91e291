"""Whose a run folder is: whoever took it last. One that was silent, and taken for gone, writes nothing more there.

    RUN/owners/0001.json    the process that began the run
    RUN/owners/0002.json    the one that resumed it

A file is made only where there is none of its number, so of two processes that resume at a time one fails. What is
seen of another machine's is as fresh as the shared file system.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from rlhfspec.cluster.folder.process_identity import ProcessIdentity
from rlhfspec.core.errors import RunTaken
from rlhfspec.core.files import storage_errors

FOLDER = "owners"


class Owner:
    """What this process knows of it; it owns nothing until it has claimed the folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._number: int | None = None
        self._text = ""
        self._taken_by = ""

    def last(self) -> int:
        """Number of the last owner, 0 where nobody has claimed the folder."""
        folder = self._run / FOLDER
        names = [path.stem for path in folder.glob("*.json")] if folder.is_dir() else []
        return max((int(name) for name in names if re.fullmatch(r"[0-9]+", name)), default=0)

    def claim(self, *, after: int) -> bool:
        """Become the owner that follows number `after`; False where somebody else has just done so.

        Raises StorageError.
        """
        text = json.dumps(
            ProcessIdentity.of_this().as_tree()
            | {"claim": uuid.uuid4().hex, "since": datetime.now(UTC).isoformat(timespec="seconds")}
        )
        path = self._path(after + 1)
        with storage_errors(path):
            path.parent.mkdir(exist_ok=True)
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return False
            with os.fdopen(file, "w") as out:
                out.write(text + "\n")
                out.flush()
                os.fsync(out.fileno())
        self._number, self._text = after + 1, text
        return True

    @property
    def name(self) -> str | None:
        """Of the own file, below the run folder; None where this process owns nothing."""
        return None if self._number is None else f"{FOLDER}/{self._number:04d}.json"

    @property
    def text(self) -> str:
        """What the own file holds."""
        return self._text

    @property
    def is_taken(self) -> bool:
        """Whether the folder was this process's own, and somebody else has taken it."""
        if self._number is None:
            return False
        if not self._taken_by:
            following = self._path(self._number + 1)
            if following.exists():
                self._taken_by = _who(following)
        return bool(self._taken_by)

    def lose(self, to: str) -> None:
        """Note that another has taken the run, as was seen elsewhere."""
        self._taken_by = self._taken_by or to

    def require(self) -> None:
        """Raise RunTaken where another process has taken the folder that this one owned."""
        if self.is_taken:
            raise RunTaken(
                f"the run {self._run} was taken up by {self._taken_by}, while this process ({os.getpid()}) was silent "
                "and taken for gone; this one ends here, and writes nothing more there"
            )

    def _path(self, number: int) -> Path:
        return self._run / FOLDER / f"{number:04d}.json"


def _who(path: Path) -> str:
    with suppress(OSError, ValueError):
        tree = json.loads(path.read_text())
        who = ProcessIdentity.from_tree(tree)
        if who is not None:
            return f"process {who.pid} on {who.host}"
    return "another process"
