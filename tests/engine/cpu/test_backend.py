"""The back end of one CPU thread is taken where it can compile, and nowhere else."""

import pytest
import torch

from rlhfspec.engine.cpu import jit
from rlhfspec.engine.cpu.backend import CpuBackend
from rlhfspec.engine.cpu.streamed_linear import StreamedLinear
from rlhfspec.engine.model.linears import MatrixLinear
from rlhfspec.engine.numerics import choose_backend
from tests.helpers.backends import CPU


def test_one_cpu_thread_is_served_by_code_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_backend(CPU), CpuBackend)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert type(choose_backend(CPU)).name == "torch"


def test_a_process_that_cannot_compile_takes_library_calls(monkeypatch, caplog) -> None:
    def refused(*_, **__) -> None:
        raise RuntimeError("no executable memory")

    monkeypatch.setattr(jit, "compile_modules", refused)
    jit.can_make_code.cache_clear()
    assert choose_backend(CPU).name == "torch"
    assert "no executable memory" in caplog.text
    jit.can_make_code.cache_clear()


def test_float32_products_are_our_own_and_others_the_library_s() -> None:
    backend, weight = CpuBackend(CPU), torch.randn(32, 16)
    assert isinstance(backend.linear(weight, None, torch.float32), StreamedLinear)
    assert isinstance(backend.linear(weight.bfloat16(), None, torch.float32), StreamedLinear)
    assert isinstance(backend.linear(weight.half(), None, torch.float16), MatrixLinear)
