"""`rlhfspec-manifest.json` of a checkpoint or state folder: what it holds, with size and SHA-256 of every file.

A folder without one (anybody else's checkpoint) has nothing to be compared with. States of a run lie beside its
checkpoints, as `state_NUMBER`.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from .errors import ModelError

MANIFEST = "rlhfspec-manifest.json"
SCHEMA_VERSION = 1
_STATE = re.compile(r"state_([0-9]+)")


class CheckpointDamaged(ModelError):
    """A file of a checkpoint or state is not what its manifest says."""

    def __init__(self, folder: Path, file: str, expected: str, got: str) -> None:
        advice = f"copy the checkpoint anew, or delete its {MANIFEST} if you changed it on purpose"
        super().__init__(
            f"{_title(folder)} is damaged: {file}: expected {expected}, got {got}; {_advice(folder, advice)}"
        )
        self.file, self.expected, self.got = file, expected, got


def write_manifest(folder: Path, *, model: str, weight_version: int, parameter_checksum: str) -> None:
    """Describe every file that `folder` holds now; meant for a folder that is not yet visible (`whole_folder`).

    `parameter_checksum` is that of the weights as they were published (`engine.weights.chunks`).
    """
    files = {
        path.relative_to(folder).as_posix(): {"num_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    tree = {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "weight_version": weight_version,
        "parameter_checksum": parameter_checksum,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(tree, indent=2) + "\n")


def has_manifest(folder: Path) -> bool:
    """Whether there is anything to compare the folder with."""
    return (folder / MANIFEST).is_file()


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Compare every file with the manifest and return it. Files that it does not name are not looked at.

    Raises ModelError: no manifest; CheckpointDamaged: the first file that is missing or differs.
    """
    tree = _read(folder)
    for name, expected in tree["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointDamaged(folder, name, "the file", "none")
        if path.stat().st_size != expected["num_bytes"]:
            got = f"{path.stat().st_size:,}"
            raise CheckpointDamaged(folder, name, f"{expected['num_bytes']:,} bytes", got)
        if (got := _sha256(path)) != expected["sha256"]:
            raise CheckpointDamaged(folder, name, f"SHA-256 {expected['sha256'][:16]}...", f"{got[:16]}...")
    return tree


def state_folders(checkpoints: Path) -> list[Path]:
    """Folders of states in a folder of checkpoints, whole or not, the newest first."""
    found = [
        path
        for path in (checkpoints.iterdir() if checkpoints.is_dir() else ())
        if _STATE.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(found, key=state_number, reverse=True)


def state_number(state: Path) -> int:
    """The iteration or step that a state was taken after. Raises ValueError: its folder has another name."""
    match = _STATE.fullmatch(state.name)
    if match is None:
        raise ValueError(f"expected a folder called state_NUMBER, got {state.name}")
    return int(match[1])


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        tree = json.loads(path.read_text())
        version = tree["schema_version"]
        if version != SCHEMA_VERSION:
            raise ValueError(f"its schema version is {version}, expected {SCHEMA_VERSION}")
        for name, expected in tree["files"].items():
            if not isinstance(expected["num_bytes"], int) or not isinstance(expected["sha256"], str):
                raise TypeError(f"size or checksum of {name} is missing")
        return tree
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        advice = _advice(folder, "copy the checkpoint anew, or delete the file if there is one")
        raise ModelError(
            f"{_title(folder)} cannot be verified: expected its {MANIFEST}, got {type(error).__name__}: {error}; "
            f"{advice}"
        ) from error


def _title(folder: Path) -> str:
    return f"{'state' if _STATE.fullmatch(folder.name) else 'checkpoint'} {folder}"


def _advice(folder: Path, of_checkpoint: str) -> str:
    """What helps; a state without its manifest would be none, whoever has changed it."""
    if _STATE.fullmatch(folder.name) is None:
        return of_checkpoint
    return (
        "put the state back from a copy of the run folder, such as run.copy_to keeps; without one the state before it "
        "serves, or the run is started anew"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
