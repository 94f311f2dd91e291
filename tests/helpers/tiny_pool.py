"""Two very small engines, requests, and the reference that a pool's completions must equal bit by bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from rlhfspec.core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.loading import freeze
from rlhfspec.policies.drafting.baselines import FixedPolicy

VOCAB_SIZE = 64
MAX_TOTAL_TOKENS = 160


class EveryNth:
    """Drafts in every n-th decode step: samples last for more steps, and there is more time for moves."""

    def __init__(self, policy: FixedPolicy, n: int) -> None:
        self.max_nodes = policy.max_nodes
        self._policy = policy
        self._n = n

    def plan(self, state: DecodeState) -> Budget:
        return PLAIN if state.decode_step % self._n else self._policy.plan(state)

    def observe(self, record: StepRecord) -> None:
        pass


PLANS = {
    "tree8": EveryNth(FixedPolicy(num_nodes=8, depth=4, branching=2), 2),
    "chain4": EveryNth(FixedPolicy(num_nodes=4, depth=4, branching=1), 2),
    "seldom": EveryNth(FixedPolicy(num_nodes=2, depth=2, branching=1), 3),
}


@functools.cache
def _model(noise: float) -> PreTrainedModel:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if noise and weight.dim() == 2:
            weight.data.add_(torch.randn_like(weight) * weight.data.std() * noise)
    return freeze(model)


def target() -> PreTrainedModel:
    """The target model; all engines share it, and none may load other weights into it."""
    return _model(0.0)


def draft() -> PreTrainedModel:
    """A draft model that is often right and often wrong."""
    return copy.deepcopy(_model(0.25))


def engine(
    plan: str,
    *,
    slots: int = 4,
    kv_cache_mb: float | None = None,
    max_total_tokens: int = MAX_TOTAL_TOKENS,
) -> Engine:
    """An engine; plans are `off`, `suffix` and PLANS."""
    speculation = SpeculationConfig(policy="fixed", drafter="suffix" if plan == "suffix" else "model")
    if plan == "off":
        speculation = SpeculationConfig(policy="off")
    policy = None if plan in ("off", "suffix") else PLANS[plan]
    return build_engine(
        target(),
        None if plan in ("off", "suffix") else draft(),
        engine=EngineConfig(
            device="cpu",
            max_running_samples=slots,
            max_prefill_tokens=96,
            probe=False,
            kv_cache_mb=kv_cache_mb,
        ),
        speculation=speculation,
        max_total_tokens=max_total_tokens,
        policy=policy,
    )


def requests(
    count: int, *, new_tokens: int = 60, group_size: int = 1, sampling: SamplingParams | None = None
) -> list[SampleRequest]:
    """Random prompts of 1 to 30 tokens, shared by groups of so many."""
    random = np.random.default_rng(3)
    prompts = [
        Prompt(
            prompt_id=number, token_ids=random.integers(0, VOCAB_SIZE, 1 if not number else 7 * number % 30)
        )
        for number in range(-(-count // group_size) + 1)
    ]
    prompts = [prompt for prompt in prompts if len(prompt.token_ids)]
    sampling = sampling or SamplingParams(max_new_tokens=new_tokens)
    return [
        SampleRequest(
            key=SampleKey(run_seed=11, stream=Stream.BENCH, sample_index=index),
            prompt=prompts[index // group_size],
            sampling=sampling,
            group_id=index // group_size,
        )
        for index in range(count)
    ]


def reference(asked: Sequence[SampleRequest]) -> dict[SampleKey, Completion]:
    """Plain decoding on one engine."""
    longest = max(len(r.prompt.token_ids) + r.sampling.max_new_tokens for r in asked)
    plain = engine("off", max_total_tokens=max(longest, MAX_TOTAL_TOKENS))
    return {completion.key: completion for completion in plain.generate(asked)}


def bits(completion: Completion) -> tuple:
    """What must not depend on where and how a sample was generated."""
    arrays = (completion.token_ids, completion.policy_logprobs, completion.sampling_logprobs)
    return (completion.finish_reason, *(array.tobytes() for array in arrays))


def mismatches(got: Mapping[SampleKey, Completion], expected: Mapping[SampleKey, Completion]) -> list[int]:
    """Sample indices that are missing, too many or different."""
    keys = got.keys() | expected.keys()
    return sorted(
        key.sample_index
        for key in keys
        if key not in got or key not in expected or bits(got[key]) != bits(expected[key])
    )
