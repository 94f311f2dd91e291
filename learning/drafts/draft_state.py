"""A draft model that learns, in a file: its weights, the optimizer's moments, and facts beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.files import storage_errors
from rlhfspec.learning.trainer.next_token import SupervisedTrainer

_KEY = "refit"


def write_draft_state(path: Path, trainer: SupervisedTrainer, facts: Mapping[str, Any]) -> None:
    """Write it; `facts` are JSON values. Raises StorageError."""
    tensors = {name: value.contiguous() for name, value in trainer.state().items()}
    with storage_errors(path):
        save_file(tensors, path, metadata={_KEY: json.dumps(facts)})


def read_draft_state(path: Path, trainer: SupervisedTrainer) -> dict[str, Any]:
    """Let a fresh trainer go on where the file was written; its facts. Raises ConfigError: it does not fit."""
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        trainer.load_state(tensors)
        if not isinstance(facts, dict):
            raise TypeError(f"facts are of type {type(facts).__name__}")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise no_draft_state(path, error) from error
    return facts


def no_draft_state(path: Path, error: Exception) -> ConfigError:
    """What to raise for a file that is none."""
    return ConfigError(
        f"{path} is no state of a draft model's training: {type(error).__name__}: {error}; resume from another"
    )
