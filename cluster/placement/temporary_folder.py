"""Where a private Ray keeps its files: below the system's temporary folder, if the names of its sockets fit there."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from rlhfspec.cluster.folder.leftovers import RAY_FOLDER
from rlhfspec.core.errors import PlacementError
from rlhfspec.core.outside import try_folder

_MAX_SOCKET_PATH_BYTES = 107
"Of Linux."
BELOW = "r"
"Ray's own folder, which it opens for everybody, lies below one that nobody else can enter."
_RAY_SOCKET_BYTES = (
    len(f"/{RAY_FOLDER}12345678/{BELOW}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store") + 2
)
LONGEST = _MAX_SOCKET_PATH_BYTES - _RAY_SOCKET_BYTES
"Bytes of a folder below which Ray's sockets fit."
PYTHON_LONGEST = _MAX_SOCKET_PATH_BYTES - len("/pymp-12345678/listener-12345678")
"The same of the sockets that Python's `multiprocessing` makes in TMPDIR, in Ray's dashboard."
SHORT = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
"Where a folder is made that does not fit there."


def temporary_base() -> Path:
    """The folder that a private Ray's own is made in. Raises PlacementError: none is short and may be written to."""
    wanted = Path(tempfile.gettempdir())
    if _size(wanted) <= LONGEST:
        return wanted
    for folder in SHORT:
        with suppress(OSError):
            if folder.is_dir():
                try_folder(folder)
                return folder
    raise PlacementError(
        f"the temporary folder {wanted} is too long for Ray's sockets: expected at most {LONGEST} bytes, got "
        f"{_size(wanted)}, and {', '.join(map(str, SHORT))} cannot be written to; set TMPDIR to a shorter path"
    )


def temporary_notes() -> list[str]:
    """What is said where the folder is another than the system's, a line; nothing where it is that. Raises as above."""
    wanted, base = Path(tempfile.gettempdir()), temporary_base()
    if base == wanted:
        return []
    return [
        f"Ray's temporary files lie in {base}: its sockets do not fit below {wanted} (TMPDIR: {_size(wanted)} bytes, "
        f"expected at most {LONGEST})"
    ]


def temporary_environment() -> dict[str, str]:
    """For Ray's processes: theirs is another TMPDIR where Python's own sockets would not fit into the given one."""
    return {} if _size(Path(tempfile.gettempdir())) <= PYTHON_LONGEST else {"TMPDIR": str(temporary_base())}


def _size(folder: Path) -> int:
    return len(os.fsencode(folder))
