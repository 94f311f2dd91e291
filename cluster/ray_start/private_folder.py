"""What a private Ray is given: a temporary folder in which its sockets fit, a token, and variables of its own.

Ray's own files lie below the system's temporary folder if the names of its sockets fit there, else below a short one.
Who cannot read the token's file reaches neither the cluster nor its dashboard and jobs:

FOLDER/auth_token       mode 600, made with the cluster and removed with it
FOLDER/gcs_address      where the cluster listens, for other commands of the same user
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ray._private import services
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from ...core.errors import PlacementError
from ...core.files import write_whole
from ...core.outside import try_folder
from ..folder.leftovers import RAY_FOLDER, is_left, own_folders

_MAX_SOCKET_PATH_BYTES = 107
"Of Linux."
BELOW = "r"
"Ray's own folder, which it opens for everybody, lies below one that nobody else can enter."
_RAY_SOCKET_BYTES = (
    len(f"/{RAY_FOLDER}12345678/{BELOW}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store") + 2
)
LONGEST = _MAX_SOCKET_PATH_BYTES - _RAY_SOCKET_BYTES
"Bytes of a folder below which Ray's sockets fit."
SHORT = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
"Where a folder is made that does not fit there."
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
TOKEN_FILE = "auth_token"
_ADDRESS_FILE = "gcs_address"


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or take out those that are None; afterwards they are as they were."""
    before = {name: os.environ.get(name) for name in values}
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


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


def _size(folder: Path) -> int:
    return len(os.fsencode(folder))


def make_token(folder: Path) -> Path:
    """Make a token in the temporary folder of a cluster to come; its file. Raises OSError."""
    path = folder / TOKEN_FILE
    path.touch(0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))
    return path


def note_address(folder: Path, address: str) -> None:
    """Write down where the cluster of a folder listens. Raises StorageError."""
    write_whole(folder / _ADDRESS_FILE, address + "\n", durable=False)


@contextmanager
def using_token(file: Path) -> Iterator[None]:
    """Let this process, and those that it starts, show the token of a file; what the caller had set comes back."""
    # a token in the environment would come before the file
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file), "RAY_AUTH_TOKEN": None}
    try:
        with environment(settings):
            _read_again()
            yield
    finally:
        _read_again()


def token_of(address: str) -> Path | None:
    """The token file of this user's private cluster at `HOST:PORT`, or at `auto` where it is the only Ray here.

    None where there is no such cluster of this user: another machine's, one that was joined, one that has ended.
    """
    if address == "auto":
        # as Ray takes it
        given = os.environ.get("RAY_ADDRESS")
        found = [given] if given else [*services.find_gcs_addresses()]
        address = found[0] if len(found) == 1 else ""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or host.strip("[]") not in LOOPBACK_NAMES:
        return None
    for base in dict.fromkeys((Path(tempfile.gettempdir()), *SHORT)):
        for folder in own_folders(base, RAY_FOLDER):
            with suppress(OSError):
                at = (folder / _ADDRESS_FILE).read_text().strip()
                if at.rpartition(":")[2] == port and (folder / TOKEN_FILE).is_file() and not is_left(folder):
                    return folder / TOKEN_FILE
    return None


def _read_again() -> None:
    """Ray keeps what the environment said when it was asked first."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
