"""`rlhfspec-manifest.json` of a checkpoint folder: what it holds, with size and SHA-256 of every file.

A folder without one (anybody else's checkpoint) has nothing to be compared with.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from core.errors import ModelError

MANIFEST = "rlhfspec-manifest.json"
SCHEMA_VERSION = 1


class CheckpointDamaged(ModelError):
    """A file of a checkpoint is not what its manifest says."""

    def __init__(self, folder: Path, file: str, expected: str, got: str) -> None:
        super().__init__(
            f"checkpoint {folder} is damaged: {file}: expected {expected}, got {got}; copy the checkpoint anew, or "
            f"delete its {MANIFEST} if you changed it on purpose"
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
        raise ModelError(
            f"checkpoint {folder} cannot be verified: expected its {MANIFEST}, got {type(error).__name__}: "
            f"{error}; copy the checkpoint anew, or delete the file if there is one"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
