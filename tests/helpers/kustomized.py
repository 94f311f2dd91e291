"""What kustomize makes of an overlay of ours: its resources with JSON patches (RFC 6902: add, replace, remove)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_KEYS = {"kind", "apiVersion", "resources", "patches"}


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """All documents of a folder with a kustomization. Fails for what ours do not use."""
    about = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(about) <= _KEYS, f"{folder}: not understood here: {set(about) - _KEYS}"
    documents: list[dict[str, Any]] = []
    for name in about["resources"]:
        place = folder / name
        documents += kustomized(place) if place.is_dir() else list(yaml.safe_load_all(place.read_text()))
    for patch in about.get("patches", []):
        (target,) = [each for each in documents if each["kind"] == patch["target"]["kind"]]
        for operation in yaml.safe_load((folder / patch["path"]).read_text()):
            _apply(target, operation)
    return documents


def _apply(document: Any, operation: dict[str, Any]) -> None:
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in way:
        document = document[int(part) if isinstance(document, list) else part]
    match operation["op"]:
        case "add":
            assert last not in document
            document[last] = operation["value"]
        case "replace":
            assert last in document
            document[last] = operation["value"]
        case "remove":
            del document[last]
        case other:
            raise AssertionError(f"not understood here: {other}")
