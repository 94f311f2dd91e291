"""TRL's settings, and adapters of its model: what merges them for the engine gets their settings and tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trl_like import ARGUMENTS

from rlhfspec.integrations.trl import sampling_of
from rlhfspec.integrations.whole_weights import whole_weights


def adapted() -> Any:
    return get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(r=1, target_modules=["0"]))  # type: ignore[arg-type]


def merge(model: Any) -> None:
    whole_weights(SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda one: one)))


def settings(name: str, value: Any, _: Path) -> None:
    model = adapted()
    recipe = model.peft_config["default"]
    given = recipe.to_dict() | {name: value}
    recipe.to_dict = lambda: given
    merge(model)


def tensors(name: str, value: Any, _: Path) -> None:
    model = adapted()
    model.get_submodule("base_model.model.0").register_parameter(
        name, nn.Parameter(torch.tensor(float(value)))
    )
    merge(model)


def trl(name: str, value: Any, _: Path) -> None:
    sampling_of(SimpleNamespace(args=SimpleNamespace(**ARGUMENTS | {name: value}), eos_token_ids=[1]))


FEEDS = {"adapter_config": settings, "adapter_tensors": tensors, "trl_config": trl}
