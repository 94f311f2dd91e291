"""Decode steps of an engine whose weights and caches have no numbers, and what they ask of the device."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.device.counted_calls import META, CountedNoiseSource, CountingRecorder, DeviceCalls
from rlhfspec.core.config import SpeculationConfig
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.attention.backends import ATTENTION
from rlhfspec.engine.cuda.cuda_backend import CudaBackend
from rlhfspec.engine.decode_step import decode_step
from rlhfspec.engine.draft_policies import build_policy
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model import runner as runner_module
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.runner import ModelRunner
from rlhfspec.engine.recorded_step import StepRecordings
from rlhfspec.engine.weights.loading import freeze

PLANS = {
    "plain": SpeculationConfig(policy="off"),
    "chain8": SpeculationConfig(policy="fixed", num_nodes=8, depth=8, branching=1),
    "tree8": SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2),
    "tree16": SpeculationConfig(policy="fixed", num_nodes=16, depth=8, branching=2),
}
BATCH, VOCAB_SIZE, CAPACITY, STEPS = 8, 512, 256, 3


def counted(plan: str, *, layers: int = 2, kernels: bool = True, recorded: bool = True) -> Counter[str]:
    """Return what a decode step of 8 samples asks of the device, a step's mean, beside `DeviceCalls.by_name`."""
    calls = DeviceCalls()
    with calls, _nothing_to_compare():
        engine = _engine(plan, calls, layers=layers, kernels=kernels, recorded=recorded)
        for index in range(BATCH):
            engine.submit(
                SampleRequest(
                    key=SampleKey(run_seed=0, stream=Stream.BENCH, sample_index=index),
                    prompt=Prompt(prompt_id=index, token_ids=np.arange(3, 20 + index)),
                    sampling=SamplingParams(max_new_tokens=100),
                )
            )
        # the first admits and fills, the second still brings drafters up, and both record
        for _ in range(2):
            engine.step()
        calls.counts.clear()
        calls.by_name.clear()
        for _ in range(STEPS):
            engine.step()
    total = calls.counts | {f"call {name}": count for name, count in calls.by_name.items()}
    return Counter({name: count / STEPS for name, count in total.items()})  # type: ignore[arg-type]


def layer_launches(plan: str, *, kernels: bool) -> float:
    """Return the launches of one decoder layer of the target in a step's forward."""
    few, many = (
        counted(plan, layers=layers, kernels=kernels, recorded=False)["launches"] for layers in (2, 4)
    )
    return (many - few) / 2


def _engine(plan: str, calls: DeviceCalls, *, layers: int, kernels: bool, recorded: bool) -> Engine:
    backend = CudaBackend(META) if kernels else ComputeBackend(META)
    backend.noise = CountedNoiseSource(calls)

    def runner(num_layers: int) -> ModelRunner:
        return ModelRunner(
            _model(num_layers),
            num_slots=BATCH,
            capacity=CAPACITY,
            backend=backend,
            vocab_size=VOCAB_SIZE,
            attention=ATTENTION["sdpa"],
        )

    return Engine(
        runner(layers),
        drafter=None if plan == "plain" else ModelDrafter(runner(1), max_prefill_tokens=8192),
        policy=build_policy(PLANS[plan]),
        max_total_tokens=CAPACITY - 32,
        max_prefill_tokens=8192,
        decode=StepRecordings(CountingRecorder(calls), max_bytes=1) if recorded else decode_step,
    )


def _model(num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=CAPACITY,
    )
    # not under `torch.device`: rotary frequencies are computed on the host
    model: Any = LlamaForCausalLM(config)
    return freeze(model.to(torch.bfloat16)).to(META)  # type: ignore[return-value,arg-type]


def _nothing_to_compare() -> patch:  # type: ignore[valid-type]
    """Tensors without numbers have nothing that could differ from the model's own forward."""
    nothing = {"__init__": lambda self, *args, **kwargs: None, "require_equal": lambda self, runner: None}
    return patch.multiple(
        runner_module,
        Comparison=type("NoComparison", (), nothing),
        refuse_unsupported=lambda model, capacity: None,
    )
