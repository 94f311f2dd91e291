"""The token of a private Ray: who cannot read its file reaches neither the cluster nor its dashboard and jobs.

FOLDER/auth_token       mode 600, made with the cluster and removed with it
FOLDER/gcs_address      where the cluster listens, for other commands of the same user
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray._private import services
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from rlhfspec.cluster.folder.leftovers import RAY_FOLDER, is_left, own_folders
from rlhfspec.cluster.placement.temporary_folder import SHORT
from rlhfspec.cluster.placement.variables import environment
from rlhfspec.core.files import write_whole

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
TOKEN_FILE = "auth_token"
_ADDRESS_FILE = "gcs_address"


def make_token(folder: Path) -> Path:
    """Make a token in the temporary folder of a cluster to come; its file. Raises OSError."""
    path = folder / TOKEN_FILE
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(secrets.token_hex(32))
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
        found = (
            [os.environ["RAY_ADDRESS"]] if os.environ.get("RAY_ADDRESS") else [*services.find_gcs_addresses()]
        )
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
