"""Parts of a long benchmark that are kept as they are done: one that was broken off goes on with the next part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def kept(path: Path, stamp: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returned when it was last called with this stamp, else what it returns now, written to `path`.

    The stamp says what the part was made with: its code and its settings. Both are plain JSON.
    """
    if path.exists():
        tree = json.loads(path.read_text())
        if tree["stamp"] == dict(stamp):
            return tree["part"]
    part = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text(json.dumps({"stamp": dict(stamp), "part": part}, indent=2) + "\n")
    half.replace(path)
    return part
