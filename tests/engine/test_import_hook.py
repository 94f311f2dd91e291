"""Functions that Triton compiles from source stay as they are written under the test runs' checks of types."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    "rlhfspec." + str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for folder in ("engine", "learning")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "\nimport triton\n" in path.read_text()
]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: extra dev")
@pytest.mark.parametrize("name", MODULES)
def test_kernels_are_read_as_they_are_written(name: str) -> None:
    """A check put around a function has names of its own: Triton would not find `tl` among them."""
    from triton.runtime import JITFunction

    module = importlib.import_module(name)
    kernels = {key: value for key, value in vars(module).items() if isinstance(value, JITFunction)}
    assert kernels, "a module that imports Triton has kernels"
    for key, kernel in kernels.items():
        assert kernel.fn.__globals__ is vars(module), f"{key} lacks @no_type_check below @triton.jit"


def test_the_modules_are_found() -> None:
    assert "rlhfspec.engine.decoding.noise_cuda" in MODULES
