"""The far end of `client.py`: orders come as JSON lines on stdin, answers go as JSON lines to stdout.

Runs inside a peer's environment, so it knows the standard library only.

    {"model": folder, "dtype": "float32", "threads": 1, "max_batch": 8, "max_total_tokens": 256}
        -> {"ready": true, "version": "1.2.3"}
    {"prompts": [[ids]], "max_new_tokens": 128, "ignore_eos": true, "temperature": 0.0}
        -> {"seconds": 1.5, "num_tokens": 128, "token_ids": [[ids]]}

Responses always have `max_new_tokens` tokens: both sides of a comparison then do the same work.
Temperature 0 is greedy, 1 is sampling from the whole vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Generate = Callable[[list[list[int]], int, float], list[list[int]]]
"Prompts, number of new tokens, temperature; returns the new tokens."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrder:
    """The first line of a conversation."""

    model: Path
    dtype: str
    threads: int
    max_batch: int
    max_total_tokens: int
    draft: Path | None = None
    "a model that drafts, for the one engine that is asked to speculate"


def serve(load: Callable[[ModelOrder], tuple[str, Generate]]) -> None:
    """Answer orders until stdin ends; `load` returns the engine's version and its generate function."""
    answers = _private_stdout()
    tree = json.loads(sys.stdin.readline())
    order = ModelOrder(**tree | {name: Path(tree[name]) for name in ("model", "draft") if tree.get(name)})
    # Set before the engine is imported: OpenMP reads it once.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(order.threads)
    version, generate = load(order)
    _say(answers, {"ready": True, "version": version})
    for line in sys.stdin:
        _say(answers, _answer(generate, json.loads(line)))


def _answer(generate: Generate, order: dict) -> dict:
    if order["ignore_eos"] is not True:
        raise ValueError("a peer decodes to a fixed length: expected ignore_eos true")
    started = time.perf_counter()
    token_ids = generate(order["prompts"], order["max_new_tokens"], order["temperature"])
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "num_tokens": sum(map(len, token_ids)), "token_ids": token_ids}


def _private_stdout() -> int:
    """Keep stdout for answers; whatever an engine prints goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def _say(answers: int, tree: dict) -> None:
    with os.fdopen(os.dup(answers), "w") as stream:
        stream.write(json.dumps(tree) + "\n")


def converted(model: Path, label: str, convert: Callable[[Path], None], root: Path | None = None) -> Path:
    """Return the folder with `model` in an engine's own format, made by `convert(folder)` when it is not there.

    Kept beside the environment; `label` names engine, version and whatever else changes the result.
    """
    root = root or Path(sys.prefix).parent / "converted"
    folder = root / f"{label}-{checksum(model)}"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=root, prefix="unfinished-"))
        try:
            convert(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def checksum(model: Path) -> str:
    """Sixteen hexadecimal digits of the content of a checkpoint's config and weights."""
    digest = hashlib.sha256()
    for path in sorted([model / "config.json", *model.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]
