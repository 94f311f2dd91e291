"""Request bodies of the engine server, through the function that reads every one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhfspec.cluster.serving.request_bodies import CompletionBody, read_body


def stream_options(name: str, value: Any, _: Path) -> None:
    read_body(json.dumps({"prompt": "a", "stream_options": {name: value}}).encode(), CompletionBody)


FEEDS = {"request.stream_options": stream_options}
