"""What a decode step on a GPU copies to the device and waits for, counted on the `meta` device.

There tensors have shapes and no numbers: the engine runs as beside the CPU, and whatever would look at a number on the
host cannot go unseen. Copies to the host give zeros, so that the engine goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfspec.core.config import EngineConfig
from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine import build as build_module
from rlhfspec.engine.attention.backends import ATTENTION
from rlhfspec.engine.decoding.noise import NoiseSource
from rlhfspec.engine.draft_policies import build_policy
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.drafters.suffix_drafter import SuffixDrafter
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model import llama_model
from rlhfspec.engine.model import runner as runner_module
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.runner import ModelRunner
from tests.engine.conftest import PLANS, VOCAB_SIZE, tiny_llama
from tests.helpers.random_heads import random_head

META = torch.device("meta")
BATCH, CAPACITY = 4, 192
LOOKS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "_unique2",
}
"In inference mode also what torch would else take apart: `item`, `to`."


class Crossings(TorchDispatchMode):
    """Counts copies between host and device, and kernels; gives zeros for what comes to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        devices = {x.device.type for x in args if isinstance(x, torch.Tensor)}
        if name in LOOKS and "meta" in devices:
            raise AssertionError(f"{name} looks at numbers of the device")
        target = kwargs.get("device", next((x for x in args if isinstance(x, torch.device)), None))
        if name in ("_to_copy", "to") and target is not None:
            blocking = "" if kwargs.get("non_blocking") else "blocking "
            if target.type == "cpu" and devices == {"meta"}:
                self.counts[blocking + "reads"] += 1
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if target.type == "meta" and devices == {"cpu"}:
                self.counts[blocking + "uploads"] += 1
        elif name == "copy_" and devices == {"cpu", "meta"}:
            raise AssertionError("a copy_ between host and device waits")
        elif "meta" in devices:
            self.counts["kernels"] += 1
        return func(*args, **kwargs)


class NotAhead(NoiseSource):
    """Where one kernel hashes and chooses: library calls in its place."""

    ahead = False


def pretended(plan: str, monkeypatch: pytest.MonkeyPatch, device: torch.device = META) -> Engine:
    """An engine whose weights and caches lie on the device; the comparison needs numbers, and has its own tests."""
    monkeypatch.setattr(runner_module.Comparison, "require_equal", lambda self, runner: None)
    monkeypatch.setattr(runner_module.Comparison, "__init__", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(runner_module, "refuse_unsupported", lambda model, capacity: None)
    monkeypatch.setattr(llama_model, "first_altered", lambda copies: None)
    backend = ComputeBackend(device)
    backend.noise = NotAhead(device)

    def runner(seed: int) -> ModelRunner:
        return ModelRunner(
            tiny_llama(seed, "bfloat16").to(device),  # pyright: ignore[reportArgumentType]
            num_slots=BATCH,
            capacity=CAPACITY,
            backend=backend,
            vocab_size=VOCAB_SIZE,
            attention=ATTENTION["sdpa"],
        )

    settings = PLANS[plan]
    drafter = None
    if settings.drafter == "suffix":
        drafter = SuffixDrafter(1 << 40, memory_mb=1.0, min_match=1)
    elif plan != "off":
        drafter = ModelDrafter(runner(2), max_prefill_tokens=8192)
    target, policy = runner(1), build_policy(settings, None)
    if settings.drafter == "head":
        # of the same shape: numbers are not known here
        head = random_head(tiny_llama(1, "bfloat16"), draft_vocab_size=48)
        config = EngineConfig(max_running_samples=BATCH)
        monkeypatch.setattr(build_module, "require_fit", lambda head, config: None)
        drafter = build_module.head_drafter(head, config, policy, target, CAPACITY - 20, VOCAB_SIZE)
    return Engine(
        target,
        drafter=drafter,
        policy=policy,
        scorer=None,
        max_total_tokens=CAPACITY,
        max_prefill_tokens=8192,
    )


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("plan", ["off", "chain4", "tree8", "suffix", "head chain", "head tree"])
def test_a_decode_step_uploads_once_and_reads_when_all_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
    make_requests: Callable[..., list[SampleRequest]],
    plan: str,
    top_p: float,
) -> None:
    engine = pretended(plan, monkeypatch)
    sampling = SamplingParams(max_new_tokens=64, temperature=0.7, top_p=top_p)
    for request in make_requests((40, 5, 17, 9), sampling):
        engine.submit(request)
    with Crossings() as first:
        engine.step()
    assert not first.counts["blocking reads"] and not first.counts["blocking uploads"], first.counts
    for _ in range(3):
        with Crossings() as step:
            engine.step()
        assert step.counts["kernels"] > 30, "the step ran on the device"
        assert step.counts["reads"] in (6, 7), "tokens, two log-probabilities, counts"
        assert not step.counts["blocking reads"] and not step.counts["blocking uploads"], step.counts
        # drafts by look-up are found on the host; a head is told which of the accepted are its cells, and which ended
        most = {"suffix": 2, "head chain": 6, "head tree": 6}.get(plan, 1)
        assert 1 <= step.counts["uploads"] <= most


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.from_numpy(np.ones(2)).to(META),
        lambda x: x.copy_(torch.ones(2)),
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: bool(x.any()),
    ],
    ids=["cpu", "to", "upload", "copy", "item", "nonzero", "bool"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_waits_is_seen(wait: Callable[[torch.Tensor], Any], inference: bool) -> None:
    refused = False
    with torch.inference_mode(inference), Crossings() as seen:
        x = torch.zeros(2, device=META)
        try:
            wait(x)
        except (AssertionError, RuntimeError, NotImplementedError):
            refused = True
    assert refused or seen.counts["blocking reads"] + seen.counts["blocking uploads"] == 1
