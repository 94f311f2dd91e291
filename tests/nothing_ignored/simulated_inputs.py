"""A model's keys as the cluster simulator reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhfspec.core.settings.simulated_cluster import QWEN_7B
from rlhfspec.policies.simulate.model_dimensions import read_dimensions


def config(name: str, value: Any, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**QWEN_7B, name: value}))
    read_dimensions(folder)


FEEDS = {"simulated.config": config}
