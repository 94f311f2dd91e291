"""Whether kernels of ours run on a device, and the operators of torch that call them: one call is one launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch

Operator = Callable[..., Any]
OPERATORS = torch.library.Library("rlhfspec", "DEF")


def can_run_triton(device: torch.device) -> bool:
    """Whether kernels of ours run there: Triton is installed, and a C compiler for the launchers it makes."""
    compiler = os.environ.get("CC") or any(which(name) for name in ("cc", "gcc", "clang"))
    return device.type == "cuda" and find_spec("triton") is not None and bool(compiler)


def define(schema: str, kernels: str, meta: Operator, body: Operator | None = None) -> None:
    """Define an operator: on CUDA the function of its name in the module `kernels` of the engine, on the CPU `body`.

    `meta` makes what it returns, without numbers.
    """
    name = schema.partition("(")[0]
    OPERATORS.define(schema)
    OPERATORS.impl(name, meta, "Meta")
    # Triton is there when it is called, on a GPU alone
    OPERATORS.impl(
        name, lambda *args: getattr(import_module(f"rlhfspec.engine.{kernels}"), name)(*args), "CUDA"
    )
    if body is not None:
        OPERATORS.impl(name, body, "CPU")
