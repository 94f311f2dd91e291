"""A norm trained for the target's exit behind its first layers: one gain, kept in a small folder.

`config.json` says of how many layers of how many it is; `model.safetensors` has `norm.weight`, [H].
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import ConfigError, ModelError
from core.files import storage_errors

CONFIG_FILE, WEIGHTS_FILE, GAIN = "config.json", "model.safetensors", "norm.weight"
KIND = "rlhfspec_exit_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitNorm:
    """Takes the last norm's place behind the first layers."""

    num_layers: int
    "the first ones, that draft"
    num_target_layers: int
    gain: Float[Tensor, " H"]
    "float32"


def save_exit_norm(folder: Path, norm: ExitNorm) -> None:
    """Write it into a folder, made if need be. Raises StorageError."""
    tree = {
        "model_type": KIND,
        "exit_layers": norm.num_layers,
        "target_num_hidden_layers": norm.num_target_layers,
        "hidden_size": len(norm.gain),
    }
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({GAIN: norm.gain.contiguous()}, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(tree, indent=2) + "\n")


def load_exit_norm(folder: Path) -> ExitNorm:
    """Read it. Raises ModelError: the folder holds none, or it is damaged."""
    try:
        tree = json.loads((folder / CONFIG_FILE).read_text())
        if tree["model_type"] != KIND:
            raise ValueError(f"its model_type is {tree['model_type']}")
        gain = load_file(folder / WEIGHTS_FILE)[GAIN].float()
        if tuple(gain.shape) != (tree["hidden_size"],) or not torch.isfinite(gain).all():
            raise ValueError(f"{GAIN} is not {tree['hidden_size']} finite numbers")
        return ExitNorm(
            num_layers=int(tree["exit_layers"]),
            num_target_layers=int(tree["target_num_hidden_layers"]),
            gain=gain,
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder} holds no norm for an early exit, which models.draft names with speculation.drafter early_exit: "
            f"{type(error).__name__}: {error}; make one with `rlhfspec drafter make --early-exit LAYERS`, or set "
            "models.draft to null for the target's last norm"
        ) from error


def require_exit_fits(norm: ExitNorm, target: Any, *, exit_layers: int) -> None:
    """Raise ModelError for a norm of another target, ConfigError where it was trained for another exit."""
    config = target.get_text_config()
    expected = int(config.num_hidden_layers), int(config.hidden_size)
    got = norm.num_target_layers, len(norm.gain)
    if got != expected:
        raise ModelError(
            f"the norm for an early exit is of a target of {got[0]} layers of {got[1]}, expected {expected[0]} of "
            f"{expected[1]}; make one for this target with `rlhfspec drafter make --early-exit LAYERS`"
        )
    if exit_layers not in (0, norm.num_layers):
        raise ConfigError(
            f"speculation.exit_layers is {exit_layers}, but the norm that models.draft names was trained behind "
            f"{norm.num_layers} layers; set it to {norm.num_layers} or 0"
        )
