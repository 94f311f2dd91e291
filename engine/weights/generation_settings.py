"""A model's generation_config.json: what ends a response, kept by every checkpoint that is trained from the model."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from core.errors import ModelError
from core.outside import is_file

FILE = "generation_config.json"


def load_generation_settings(model: str) -> GenerationConfig | None:
    """Return what a model (path or hub name) says of sampling; None where it has no such file.

    Raises ModelError: the file is there and cannot be read.
    """
    try:
        return GenerationConfig.from_pretrained(model)
    except (OSError, ValueError, TypeError) as error:
        file = Path(model).expanduser() / FILE
        if not is_file(file):
            return None
        said = " ".join(str(error).split())[:200]
        raise ModelError(
            f"cannot read {file}, which names the end tokens: {said}; mend or delete it"
        ) from error


def write_generation_settings(settings: GenerationConfig | None, folder: Path) -> None:
    """Write them into a saved model; unchecked, as they came with a model that was in use. None: it keeps its own."""
    if settings is not None:
        settings.to_json_file(folder / FILE)
