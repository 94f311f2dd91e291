"""Imports every module of core, profiles and policies: they must load without torch and Ray installed."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

for package in ("torch", "ray", "transformers"):
    if find_spec(package):
        sys.exit(
            f"slim imports: {package} is installed here, so this proves nothing; use a fresh environment"
        )
modules = [
    "rlhfspec." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("core", "profiles", "policies")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
for module in modules:
    importlib.import_module(module)
print(f"slim imports: {len(modules)} modules load without torch and Ray")
