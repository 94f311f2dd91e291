"""Which tree runs, and which version of it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlhfspec.cluster.cli import build_parser
from rlhfspec.cluster.ray_start.origin import ROOT, version


def test_the_version_is_that_of_the_tree() -> None:
    assert version() == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_without_a_checkout_the_installed_version_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"9.9 of {name}")
    assert version(tmp_path) == "9.9 of rlhfspec"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "1"\n')
    assert version(tmp_path) == "9.9 of rlhfspec"


def test_version_is_printed_without_loading_torch() -> None:
    code = (
        "import sys; from rlhfspec.cluster.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: sys.exit(end.code or ('torch' in sys.modules) * 9)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, f"rlhfspec {version()}\n")


HEAVY = ("importlib.metadata", "numpy", "pydantic", "ray", "rich", "torch", "transformers", "yaml")
TORCH = ("torch", "transformers")
MODELING = ("transformers.modeling_utils", "transformers.generation.utils")
OF_A_MODULE = "__import__(sys.argv[1])"
OF_A_COMMAND = (
    "from rlhfspec.cluster.cli import main\ntry: main(sys.argv[1].split())\nexcept SystemExit: pass"
)


@pytest.mark.parametrize(
    "program, entry, left_out",
    [
        (OF_A_COMMAND, "--help", HEAVY),
        (OF_A_COMMAND, "train --help", HEAVY),
        (OF_A_COMMAND, "models make --help", HEAVY),
        (OF_A_MODULE, "rlhfspec.actors.scheduling.scheduler_actor", TORCH),
        (OF_A_MODULE, "rlhfspec.actors.workers.reward_actors", TORCH),
        (OF_A_MODULE, "rlhfspec.actors.generation.generation_actor", TORCH),
        (OF_A_MODULE, "rlhfspec.actors.generation.engine_host", MODELING),
        (OF_A_MODULE, "rlhfspec.cluster.run.loop", MODELING),
        (OF_A_MODULE, "rlhfspec.cluster.jobs.engine_server", MODELING),
    ],
)
def test_a_process_imports_what_it_uses(program: str, entry: str, left_out: tuple[str, ...]) -> None:
    told = "\nprint(*(name for name in sys.argv[2:] if name in sys.modules), 'there', file=sys.stderr)"
    words = [sys.executable, "-c", f"import sys\n{program}{told}", entry, *left_out]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "there\n")


def test_words_of_a_command_line_are_parsed_as_by_the_whole_one() -> None:
    for words in (["train", "--set", "a=1", "--dry-run"], ["models", "make", "--data", "a", "--out", "b"]):
        whole, own = (parser.parse_args(words) for parser in (build_parser(), build_parser(words)))
        assert vars(whole) == vars(own)
