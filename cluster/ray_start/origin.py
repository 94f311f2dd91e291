"""Which tree runs: a checkout, or an installed wheel; and that all of `rlhfspec` comes from it.

Standard library only: it runs before anything else of ours is imported.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("core", "profiles", "policies", "engine", "learning", "actors", "cluster", "integrations")

NAME = "rlhfspec"

ROOT = Path(__file__).resolve().parents[2]
"The checkout, or the folder `rlhfspec` of the installed package."

IS_CHECKOUT = (ROOT / "rlhfspec.py").is_file()


def version(root: Path = ROOT) -> str:
    """Version of the tree that runs; of the installed distribution where the tree is no checkout."""
    project = root / "pyproject.toml"
    if project.is_file():
        import tomllib

        about = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if about.get("name") == NAME:  # beside an installed package may stand anybody's
            return about["version"]
    from importlib import metadata

    return metadata.version(NAME)


def shadowed_packages(root: Path = ROOT) -> list[str]:
    """One line for every package of ours that does not resolve to `root`; empty when all do."""
    faults = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(f"{NAME}.{name}")
        found = None if spec is None or spec.origin is None else Path(spec.origin)
        if found is None or found.resolve().parent != root / name:
            fix = "take one of the two off the Python path (PYTHONPATH or site-packages)"
            faults.append(
                f"package '{NAME}.{name}' was expected in {root}, got {found.parent if found else 'none'}; "
                f"{fix if found else 'run from a complete checkout'}"
            )
    return faults
