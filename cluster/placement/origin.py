"""Start-up check: each of our packages must come from this tree.

The packages have generic names (docs/decisions/0001-flat-names.md), so that a job runs local edits
without an install. The price is that another `core` earlier on the path would win silently; this
says so instead, naming the path. Standard library only: it runs before anything of ours is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("core", "profiles", "policies", "engine", "learning", "actors", "cluster")

NAME = "rlhfspec"

ROOT = Path(__file__).resolve().parents[2]


def version(root: Path = ROOT) -> str:
    """Version of the tree that runs; of the installed distribution where the tree is no checkout."""
    project = root / "pyproject.toml"
    if project.is_file():
        about = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if about.get("name") == NAME:  # beside an installed package may stand anybody's
            return about["version"]
    return importlib.metadata.version(NAME)


def shadowed_packages(root: Path = ROOT, names: Iterable[str] = PACKAGES) -> list[str]:
    """Return one line for every package that does not resolve to `root`; empty when all do."""
    faults = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            faults.append(f"package '{name}' was expected in {root}, got none; run from a complete checkout")
        elif Path(spec.origin).resolve().parent != root / name:
            found = Path(spec.origin).parent
            faults.append(
                f"package '{name}' was expected in {root}, got {found}; "
                f"take {found.parent} off the Python path (PYTHONPATH or site-packages)"
            )
    return faults
