"""A model's generation_config.json: what ends a response, kept by every checkpoint that is trained from the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from ...core.errors import ModelError
from ...core.outside import is_file, quote

FILE = "generation_config.json"


def load_generation_settings(model: str) -> GenerationConfig | None:
    """Return what a model (path or hub name) says of sampling; None where it has no such file.

    Raises ModelError: the file is there and cannot be read, or names end tokens by something else than their ids.
    """
    try:
        settings = GenerationConfig.from_pretrained(model)
        _require_ids(model, settings.eos_token_id)
        return settings
    except (OSError, ValueError, TypeError) as error:
        file = Path(model).expanduser() / FILE
        if not is_file(file):
            return None
        said = " ".join(str(error).split())[:200]
        raise ModelError(
            f"cannot read {file}, which names the end tokens: {said}; fix or delete it"
        ) from error


def _require_ids(model: str, eos: Any) -> None:
    """Raise ModelError for a value of eos_token_id that would be passed over, so that nothing ended a response."""
    named = eos if isinstance(eos, list) else [eos]
    odd = [one for one in named if one is not None and (isinstance(one, bool) or not isinstance(one, int))]
    if odd:
        raise ModelError(
            f"the {FILE} of '{model}' has eos_token_id {quote(odd[0])}; expected the id of a token, a list of ids, or "
            "null; fix it"
        )


def as_ids(eos: int | list[int] | None) -> list[int]:
    """The ids of an eos_token_id, which may be one, several or none."""
    return [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]


def config_end_tokens(model: str) -> list[int]:
    """Ids that a model's config.json itself, not a default, ends a response with; none where it names none."""
    named = _config_of(model)
    inner = named.get("text_config")
    return as_ids(
        named.get("eos_token_id") or (inner.get("eos_token_id") if isinstance(inner, dict) else None)
    )


def ending_at(model: str, token_ids: Sequence[int]) -> GenerationConfig | None:
    """The settings of a model with all of `token_ids` among its end tokens, so that what is saved stops there.

    None where it has no such file and its config.json names them all. Raises ModelError as above.
    """
    settings = load_generation_settings(model)
    named = config_end_tokens(model) if settings is None else as_ids(settings.eos_token_id)
    more = [token for token in token_ids if token not in named]
    if more and settings is None:
        kept = {
            key: value for key, value in _config_of(model).items() if key in ("bos_token_id", "pad_token_id")
        }
        settings = GenerationConfig(**kept)
    if more and settings is not None:
        every = [*named, *more]
        settings.eos_token_id = every if len(every) > 1 else every[0]
    return settings


def _config_of(model: str) -> dict[str, Any]:
    try:
        return PretrainedConfig.get_config_dict(model)[0]
    except (OSError, ValueError, TypeError):  # loading the model says why
        return {}


def write_generation_settings(settings: GenerationConfig | None, folder: Path) -> None:
    """Write them into a saved model; unchecked, as they came with a model that was in use. None: it keeps its own."""
    if settings is not None:
        settings.to_json_file(folder / FILE)
