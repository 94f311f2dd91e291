"""Scored by the engine's forward: the sampler's log-probabilities bit for bit, whatever was drafted or batched."""

import copy
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from core.config import AlgorithmConfig, EngineConfig, SpeculationConfig, TrainerConfig
from core.errors import ConfigError
from core.records import Prompt, Reward, Rollout, SampleKey, SampleRequest, SamplingParams
from core.training_config import LoraConfig
from engine.build import build_engine
from engine.weights.causal_lm import DTYPES
from engine.weights.loading import freeze
from learning.experience import collate
from learning.forward.engine_scoring import EngineScorer, require_engine_scoring, with_values
from learning.learner import Learner

ENGINE = EngineConfig(device="cpu", probe=False, max_prefill_tokens=64)
TREE = SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2)
LONGEST = 170
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def sampled(model, *, sampling: SamplingParams, batch: int, version: int = 0, seed: int = 0) -> list[Rollout]:
    """Groups of two prompts; the draft model is the target, disturbed."""
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
            prompt=Prompt(prompt_id=index // 2, token_ids=prompts[index // 2]),
            sampling=sampling,
            group_id=index // 2,
        )
        for index in range(8)
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
    model, scorer, *, kind: Literal["ppo", "grpo"] = "grpo", temperature=1.0, lora=None, **trainer
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
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "lora", "temperature", "top_p"),
    [("grpo", False, 1.0, 1.0), ("ppo", False, 0.7, 0.9), ("grpo", True, 1.0, 1.0)],
)
def test_the_learner_has_the_samplers_bits(dtype, kind, lora, temperature, top_p):
    if lora:
        pytest.importorskip("peft")
    published = target(dtype)
    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=16)
    learner = learner_of(
        published,
        scorer_of(published, temperature),
        kind=kind,
        temperature=temperature,
        lora=LoraConfig(rank=4) if lora else None,
    )
    first = learner.update(sampled(published, sampling=sampling, batch=2)).figures
    assert first["mismatch/bit_equal_share"] == 1.0
    assert first["ratio_at_first_minibatch"] == 1.0
    assert first["reference_kl"] == 0.0
    # the next version, as instances sample from it
    published.load_state_dict(dict(learner.weights()))
    second = learner.update(sampled(published, sampling=sampling, batch=8, version=1, seed=1)).figures
    assert second["mismatch/bit_equal_share"] == 1.0
    assert second["ratio_at_first_minibatch"] == 1.0
    assert second["reference_kl"] > 1e-6


def test_a_temperature_is_divided_by_as_the_sampler_does():
    model = target()
    sampling = SamplingParams(temperature=0.7, max_new_tokens=24)
    experience = collate(sampled(model, sampling=sampling, batch=8), pad_token_id=0)
    assert torch.equal(scorer_of(model, 0.7).logprobs(experience), experience.old_logprobs)
    assert not torch.equal(scorer_of(model, 1.0).logprobs(experience), experience.old_logprobs)


def test_some_rows_are_scored_as_all_are_and_the_learners_threads_are_left_alone():
    model = target()
    experience = collate(sampled(model, sampling=SamplingParams(max_new_tokens=8), batch=8), pad_token_id=0)
    few_slots = scorer_of(model, engine=ENGINE.model_copy(update={"max_running_samples": 2}))
    torch.set_num_threads(2)
    scores = few_slots.logprobs(experience, [6, 1, 3])
    assert torch.get_num_threads() == 2
    chosen = torch.tensor([1, 3, 6])
    assert torch.equal(scores[chosen], experience.old_logprobs[chosen])
    assert not scores[[0, 2, 4, 5, 7]].any()


def test_an_engine_of_other_weights_is_seen_in_the_share():
    model = target()
    rollouts = sampled(model, sampling=SamplingParams(max_new_tokens=8), batch=8)
    changed = copy.deepcopy(model)
    changed.lm_head.weight.data.mul_(1.01)
    figures = learner_of(changed, scorer_of(model)).update(rollouts).figures
    assert figures["mismatch/bit_equal_share"] < 0.1
    assert figures["ratio_at_first_minibatch"] != 1.0


def test_values_are_the_engines_and_gradients_the_models():
    own = torch.tensor([-1e-7, -3.0, -0.5], requires_grad=True)
    values = torch.tensor([-3e-4, -3.0000005, -40.0])
    joined = with_values(own, values)
    assert torch.equal(joined, values)
    (joined * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert own.grad is not None and own.grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("engine", "device", "message"),
    [
        (EngineConfig(device="cpu", num_threads=2), CPU, "engine.num_threads is 2"),
        (EngineConfig(device="cpu", numerics="fast"), CPU, "engine.numerics says so"),
        (ENGINE, torch.device("cuda"), "the trainer is on cuda"),
    ],
)
def test_where_bits_are_not_promised_the_setting_is_refused_with_what_to_do(engine, device, message):
    with pytest.raises(ConfigError, match=rf"{message}.*set trainer\.scoring: model"):
        require_engine_scoring(engine, device)


def test_a_learner_without_the_scorer_that_its_config_names_is_refused():
    with pytest.raises(ConfigError, match="given no scorer"):
        learner_of(target(), None)


def test_a_sample_longer_than_the_caches_is_refused():
    model = target()
    rollouts = sampled(model, sampling=SamplingParams(max_new_tokens=8), batch=8)
    scorer = EngineScorer(
        copy.deepcopy(model), engine=ENGINE, max_total_tokens=60, vocab_size=64, temperature=1.0
    )
    with pytest.raises(ConfigError, match="127 tokens was to be scored by an engine built for 60"):
        scorer.logprobs(collate(rollouts, pad_token_id=0))
