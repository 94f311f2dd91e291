"""Which weights of a run are still there, and whether they are the ones it sampled from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...core.checkpoint_manifest import MANIFEST, CheckpointDamaged, has_manifest, verify_checkpoint
from ...core.errors import ConfigError, ModelError
from ...core.files import PARTIAL, REPLACED
from ..folder.iteration_logs import read_weights_log
from ..folder.layout import RunDir
from .verification import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A model that can be loaded, and the checksum that its parameters must have; None: nothing noted it."""

    name: str
    "a path or a hub name"
    checksum: str | None


@dataclass(slots=True, kw_only=True)
class KeptWeights:
    """The target's versions that are kept whole, and what is wrong with others."""

    targets: dict[int, KeptModel] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    "versions of which there is a checkpoint, and none that is whole"
    num_checkpoints: int = 0
    "folders that were compared with their manifests"
    unverified: list[str] = field(default_factory=list)
    "checkpoint folders without a manifest"


def find_weights(run: Path, first_model: str) -> KeptWeights:
    """Compare every checkpoint of a run with its manifest, and its manifest with what the run noted.

    `first_model` is what the run began with: version 0.
    """
    found = KeptWeights()
    noted = read_weights_log(RunDir(path=run).weights_file)
    for folder in _checkpoints(run):
        if not has_manifest(folder):
            found.unverified.append(folder.name)
            continue
        found.num_checkpoints += 1
        version = _claimed_version(folder)
        try:
            tree = verify_checkpoint(folder)
            is_target = tree["model"] == "target"
            version, checksum = int(tree["weight_version"]), str(tree["parameter_checksum"])
        except (ModelError, KeyError, TypeError, ValueError) as error:
            if not folder.is_dir():
                # a running run keeps only so many
                found.num_checkpoints -= 1
                continue
            found.differences.append(_damage(folder, error))
            if version is not None:
                found.damaged.add(version)
            continue
        if not is_target:
            continue
        expected = noted.get(version, checksum)
        if checksum != expected:
            found.differences.append(
                Difference(
                    file=f"checkpoints/{folder.name}/{MANIFEST}",
                    what=f"parameter checksum of weight version {version}",
                    expected=f"{expected} (weights.jsonl)",
                    got=checksum,
                )
            )
        found.targets.setdefault(version, KeptModel(name=str(folder), checksum=expected))
    _add_first(found, first_model, noted.get(0))
    found.damaged -= found.targets.keys()
    return found


def kept_version(run: Path, first_model: str, version: int | None) -> tuple[int, str]:
    """A version that a run keeps, None for its last, and the model to load. Raises ConfigError: it is not kept."""
    kept = find_weights(run, first_model).targets
    chosen = max(kept, default=0) if version is None else version
    if chosen not in kept:
        raise ConfigError(
            f"{run} keeps no whole weights of version {chosen}: expected --version "
            f"{', '.join(map(str, sorted(kept))) or '(none is kept)'}; run.keep_checkpoints keeps more"
        )
    return chosen, kept[chosen].name


def _add_first(found: KeptWeights, name: str, noted: str | None) -> None:
    folder = Path(name).expanduser()
    if has_manifest(folder):
        found.num_checkpoints += 1
        try:
            verify_checkpoint(folder)
        except ModelError as error:
            found.differences.append(_damage(folder, error))
            found.damaged.add(0)
            return
    found.targets[0] = KeptModel(name=name, checksum=noted)


def _checkpoints(run: Path) -> Iterator[Path]:
    parent = run / "checkpoints"
    if parent.is_dir():
        for folder in sorted(parent.iterdir()):
            if folder.is_dir() and not folder.name.startswith((PARTIAL, REPLACED)):
                yield folder


def _claimed_version(folder: Path) -> int | None:
    """The version that a target's manifest claims, whether the files agree or not."""
    try:
        tree = json.loads((folder / MANIFEST).read_text())
        return int(tree["weight_version"]) if tree["model"] == "target" else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _damage(folder: Path, error: Exception) -> Difference:
    where = f"checkpoints/{folder.name}" if folder.parent.name == "checkpoints" else str(folder)
    if isinstance(error, CheckpointDamaged):
        file = f"{where}/{error.file}"
        return Difference(file=file, what="content", expected=error.expected, got=error.got)
    return Difference(file=where, what="manifest", expected="a whole one", got=str(error))
