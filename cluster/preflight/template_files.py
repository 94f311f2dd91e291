"""Chat templates that lie beside one another in a tokenizer's folder: the one that is read, and others."""

from __future__ import annotations

import json
from pathlib import Path

from core.outside import is_file

TEMPLATE_FILE = "chat_template.jinja"
"Read before all others."
_IN_JSON = ("tokenizer_config.json", "chat_template.json")


def other_templates(folder: Path) -> list[str]:
    """JSON files of a folder whose chat template is not that of `TEMPLATE_FILE`, which is read in its stead.

    None where there is no such file, or no folder; what cannot be read holds no template.
    """
    if not is_file(folder / TEMPLATE_FILE):
        return []
    try:
        read = (folder / TEMPLATE_FILE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    held = {name: _template_of(folder / name) for name in _IN_JSON}
    return [name for name, text in held.items() if text is not None and text.strip() != read]


def _template_of(file: Path) -> str | None:
    try:
        text = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None
