"""Which tree runs, and which version of it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
