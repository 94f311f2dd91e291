"""`weights.jsonl`: the parameter checksum of every version of the target that the run sampled from, a line each."""

from __future__ import annotations

import json
from pathlib import Path

from rlhfspec.core.files import append_whole
from rlhfspec.core.weight_records import WeightManifest


def note_weights(path: Path, manifest: WeightManifest) -> None:
    """Append a version that instances have confirmed. Raises StorageError."""
    line = {
        "model": manifest.model,
        "weight_version": manifest.weight_version,
        "parameter_checksum": manifest.checksum,
    }
    append_whole(path, json.dumps(line) + "\n")


def read_weights_log(path: Path) -> dict[int, str]:
    """Checksums by version, the last of each where a run was resumed; empty where there is no such file.

    A line that is cut or damaged is left out.
    """
    checksums: dict[int, str] = {}
    if not path.is_file():
        return checksums
    for line in path.read_bytes().splitlines():
        try:
            tree = json.loads(line)
            version, checksum = tree["weight_version"], tree["parameter_checksum"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(version, int) and isinstance(checksum, str):
            checksums[version] = checksum
    return checksums
