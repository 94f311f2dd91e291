"""Runs a script in a process of its own that begins with torch, transformers, the engine and learning imported.

It is a fork of a process that has them, which saves seconds of a processor each time.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 600.0
IMPORTED = (
    "peft",
    "rlhfspec.engine.build",
    "rlhfspec.learning.training.learner",
    "rlhfspec.learning.training.learner_state",
    "rlhfspec.learning.training.sharded",
)


def forks() -> multiprocessing.context.ForkServerContext:
    """Processes that are forks of one that has imported what most of a test's processes need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    return context


def output_of(
    text: str, *words: object, folders: Sequence[Path] = (), cwd: Path = ROOT, **variables: str
) -> str:
    """Return what a script prints; `folders` go first where it looks for modules.

    Raises AssertionError with its errors where it fails or has not ended in ten minutes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(text)
        argv, path = [str(folder / "script.py"), *map(str, words)], [*map(str, folders)]
        process = forks().Process(target=_run, args=(argv, path, cwd, os.environ | variables))
        process.start()
        process.join(LONGEST_S)
        process.kill()
        process.join()
        said, errors = (folder / "out").read_text(), (folder / "errors").read_text()
    assert process.exitcode == 0, f"exit status {process.exitcode}: {errors[-3000:]}"
    return said.strip()


def as_main(module: str) -> str:
    """Return the text of a script that is a module's."""
    return f"import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"


def _run(argv: list[str], path: list[str], cwd: Path, environment: Mapping[str, str]) -> None:
    for number, name in enumerate(("out", "errors"), 1):
        os.dup2(os.open(Path(argv[0]).with_name(name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.path[:0] = argv, path
    runpy.run_path(argv[0], run_name="__main__")
