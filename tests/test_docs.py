"""The documentation names files, functions and settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATH = re.compile(
    r"`((?:core|profiles|policies|engine|learning|actors|cluster|benchmarks|configs|docs)/[\w./-]*)"
)
MEMBER = re.compile(r"`([\w/]+\.py):(\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_named_in_a_page_exists(page: Path) -> None:
    missing = [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()]
    assert not missing


def test_every_function_of_the_papers_map_exists() -> None:
    members = MEMBER.findall((ROOT / "docs" / "papers.md").read_text())
    assert len(members) > 20
    missing = [
        f"{path}:{name}"
        for path, name in members
        if not re.search(rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert not missing
