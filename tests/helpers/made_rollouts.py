"""Scored responses made by hand."""

from __future__ import annotations

import numpy as np

from rlhfspec.core.records import Completion, FinishReason, Prompt, Reward, Rollout, SampleKey, WeightSpan


def rollout(
    index: int = 0,
    *,
    group: int = 0,
    reward: float = 0.0,
    parts: dict[str, float] | None = None,
    num_tokens: int = 4,
    is_cut: bool = False,
    prompt: str = "question",
    response: str = "answer",
) -> Rollout:
    """One of `num_tokens` tokens, each the index."""
    logprobs = np.full(num_tokens, -0.5, dtype=np.float32)
    return Rollout(
        prompt=Prompt(prompt_id=group, token_ids=np.array([1, 2]), text=prompt),
        completion=Completion(
            key=SampleKey(run_seed=0, sample_index=index),
            prompt_id=group,
            group_id=group,
            epoch=0,
            token_ids=np.full(num_tokens, index),
            policy_logprobs=logprobs,
            sampling_logprobs=logprobs,
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            weight_spans=(WeightSpan(weight_version=0, first_position=0),),
            instance="gen-0",
            num_decode_steps=num_tokens,
            num_accepted_tokens=0,
        ),
        response_text=response,
        reward=Reward(value=reward, parts=parts or {}),
    )
