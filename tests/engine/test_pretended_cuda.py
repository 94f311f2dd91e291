"""The real decode step on pretended CUDA tensors: no operation between devices, no unknown look from the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine import decode_step as decode_step_module
from rlhfspec.engine.decoding.step_phases import Phases
from tests.engine.test_device_waits import pretended
from tests.helpers.pretended_cuda import CUDA, NEEDS_BUILD, PretendedCuda, without_a_driver

pytestmark = NEEDS_BUILD


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("plan", ["off", "chain4", "tree8"])
def test_a_decode_step_keeps_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
    make_requests: Callable[..., list[SampleRequest]],
    plan: str,
    top_p: float,
) -> None:
    without_a_driver(monkeypatch)
    # streams and events need a driver; the one wait that they make is `Phases.finish`
    monkeypatch.setattr(
        decode_step_module, "Phases", lambda clock, device: Phases(clock, torch.device("cpu"))
    )
    with PretendedCuda() as seen:
        engine = pretended(plan, monkeypatch, CUDA)
        for request in make_requests((40, 5, 17, 9), SamplingParams(max_new_tokens=64, top_p=top_p)):
            engine.submit(request)
        seen.forget()
        engine.step()
        assert not seen.waits, "prefill and the first step"
        for _ in range(3):
            seen.forget()
            engine.step()
            assert seen.num_kernels > 30, "the step ran on the device"
            assert not seen.waits, seen.waits
            assert seen.up == {"engine/upload:upload": 1}
            assert set(seen.down) == {"engine/decode_step:_to_host"} and seen.down.total() in (6, 7)
