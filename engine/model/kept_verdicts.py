"""What the invariance probe said of a model's shapes on this machine, kept on disk: a second start does not ask again.

A verdict holds for what it depends on: shapes, type, sizes of the cache, processor, threads, packages, and every line
of this package's code. Weights are no part of it, as they are none of what the probe promises. A file that is damaged
or describes something else is no verdict.
"""

from __future__ import annotations

import json
import logging
import platform
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from rlhfspec.core.errors import StorageError
from rlhfspec.core.files import write_whole
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.engine.model.runner import ModelRunner
from rlhfspec.engine.weights.chunks import unique_tensors

Verdict = Literal["holds", "holds_unpacked"]
"The second with plain products, where prepacked ones do not round alike."
_VERDICTS = ("holds", "holds_unpacked")
_PACKAGES = ("torch", "transformers", "numpy", "llvmlite")
logger = logging.getLogger(__name__)


class KeptVerdicts:
    """A folder of verdicts, one file each."""

    def __init__(self, folder: Path) -> None:
        """The folder is made when the first verdict is kept."""
        self._folder = folder

    def read(self, facts: dict[str, Any]) -> Verdict | None:
        """Return what was said of the same facts; None: nothing, or nothing that can be read."""
        try:
            kept = json.loads(self._file(facts).read_text())
            verdict = kept["verdict"]
            if kept["facts"] == facts and verdict in _VERDICTS and kept["digest"] == _digest(facts, verdict):
                return verdict
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return None

    def keep(self, facts: dict[str, Any], verdict: Verdict) -> None:
        """Write a verdict, whole or not at all; where nothing can be written the next start checks again."""
        kept = {"verdict": verdict, "digest": _digest(facts, verdict), "facts": facts}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(facts), json.dumps(kept, indent=1))
        except (OSError, ValueError, StorageError) as error:
            logger.info("a start-up verdict is not kept in %s: %s", self._folder, error)

    def _file(self, facts: dict[str, Any]) -> Path:
        return self._folder / f"{_digest(facts, '')}.json"


def facts_of(runner: ModelRunner, *, max_nodes: int) -> dict[str, Any]:
    """What a verdict depends on, as JSON."""
    cuda = runner.device.type == "cuda"
    return {
        "model": _config(runner.model.config.to_json_string(use_diff=False)),
        "weights": [[name, *shape] for name, shape in _shapes(runner.model).items()],
        "dtype": str(runner.model.dtype),
        "forward": type(runner._forward).__name__,
        "attention": getattr(runner.attention, "__name__", type(runner.attention).__name__),
        "backend": runner.backend.name,
        "prepacked": runner.prepacked,
        "vocab_size": runner.vocab_size,
        "num_slots": runner.pool.num_slots,
        "capacity": runner.pool.capacity,
        "max_nodes": max_nodes,
        "device": torch.cuda.get_device_name(runner.device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "code": _code(),
    }


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    if isinstance(model, LlamaModel):
        return model.shapes
    return {name: tuple(tensor.shape) for name, tensor in unique_tensors(model)}


def _config(hf_config_json: str) -> dict[str, Any]:
    """All of a config but where it was read from: the same model in another folder is the same."""
    return {key: value for key, value in json.loads(hf_config_json).items() if key != "_name_or_path"}


def _digest(facts: dict[str, Any], verdict: str) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([facts, verdict], sort_keys=True).encode())


@lru_cache(maxsize=1)
def _processor() -> str:
    """Model, stepping and instructions: library kernels are chosen by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    return "; ".join(line for line in lines if line.split(":")[0].strip() in told)


@lru_cache(maxsize=1)
def _code() -> str:
    """Of every module of the package `engine`."""
    root = Path(__file__).resolve().parents[1]
    whole = xxhash.xxh3_128()
    for path in sorted(root.rglob("*.py")):
        whole.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
