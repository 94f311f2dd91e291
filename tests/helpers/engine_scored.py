"""Rollouts sampled by an engine, and learners whose log-probabilities are that engine's."""

import copy
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rlhfspec.core.config import (
    AlgorithmConfig,
    EngineConfig,
    SpeculationConfig,
    TrainerConfig,
)
from rlhfspec.core.records import Prompt, Reward, Rollout, SampleKey, SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.loading import freeze
from rlhfspec.learning.training.engine_scoring import EngineScorer
from rlhfspec.learning.training.learner import Learner

ENGINE = EngineConfig(device="cpu", probe=False, max_prefill_tokens=64)
TREE = SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2)
LONGEST = 170


def target(dtype: str = "float32") -> PreTrainedModel:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    # not `.to(dtype)` afterwards: that would round the rotary frequencies too
    return freeze(AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]))


def sampled(
    model,
    *,
    sampling: SamplingParams,
    batch: int,
    version: int = 0,
    seed: int = 0,
    samples_per_prompt: int = 2,
) -> list[Rollout]:
    """Groups of four prompts; the draft model is the target, disturbed."""
    draft = copy.deepcopy(model)
    torch.manual_seed(5)
    for weight in draft.parameters():
        weight.data.add_(torch.randn_like(weight) * weight.data.std() * 0.1)
    engine = build_engine(
        copy.deepcopy(model),
        draft,
        engine=ENGINE.model_copy(update={"max_running_samples": batch}),
        speculation=TREE,
        max_total_tokens=LONGEST,
        weight_version=version,
    )
    random = np.random.default_rng(seed)
    prompts = [random.integers(2, 64, length) for length in (1, 20, 119, 40)]
    requests = [
        SampleRequest(
            key=SampleKey(run_seed=1, sample_index=index),
            prompt=Prompt(
                prompt_id=index // samples_per_prompt, token_ids=prompts[index // samples_per_prompt]
            ),
            sampling=sampling,
            group_id=index // samples_per_prompt,
        )
        for index in range(4 * samples_per_prompt)
    ]
    return [
        Rollout(
            prompt=request.prompt,
            completion=completion,
            response_text="",
            reward=Reward(value=float(completion.token_ids.sum() % 5)),
        )
        for request, completion in zip(requests, engine.generate(requests), strict=True)
    ]


def scorer_of(model, temperature: float = 1.0, engine: EngineConfig = ENGINE) -> EngineScorer:
    return EngineScorer(
        copy.deepcopy(model),
        engine=engine,
        max_total_tokens=LONGEST,
        vocab_size=64,
        temperature=temperature,
    )


def learner_of(
    model,
    scorer,
    *,
    kind: Any = "grpo",
    temperature=1.0,
    lora=None,
    trainers=None,
    compute_dtype=torch.float32,
    **trainer,
) -> Learner:
    settings = {"learning_rate": 1e-2, "minibatch_size": 3, "scoring": "engine"} | trainer
    return Learner(
        copy.deepcopy(model).float().requires_grad_(True),
        algorithm=AlgorithmConfig(kind=kind, kl_coef=0.05),
        trainer=TrainerConfig(lora=lora, **settings),
        temperature=temperature,
        seed=5,
        pad_token_id=0,
        vocab_size=64,
        scorer=scorer,
        trainers=trainers,
        compute_dtype=compute_dtype,
    )
