"""Scored by the engine's forward: the sampler's log-probabilities bit for bit, whatever was drafted or batched."""

import copy

import pytest
import torch
from engine_scored import ENGINE, learner_of, sampled, scorer_of, target

from rlhfspec.core.config import AlgorithmConfig, EngineConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.records import SamplingParams
from rlhfspec.core.settings.correction import CorrectionConfig
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.learning.training.engine_scoring import EngineScorer, require_engine_scoring, with_values
from rlhfspec.learning.training.experience import collate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "lora", "temperature", "top_p"),
    [("grpo", False, 1.0, 1.0), ("ppo", False, 0.7, 0.9), ("grpo", True, 1.0, 1.0)],
)
def test_the_learner_has_the_samplers_bits(dtype, kind, lora, temperature, top_p, products):
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
        compute_dtype=DTYPES[products],
    )
    first = learner.update(sampled(published, sampling=sampling, batch=2)).metrics
    assert first["mismatch/bit_equal_share"] == 1.0
    assert first["ratio_at_first_minibatch"] == 1.0
    assert first["reference_kl"] == 0.0
    # the next version, as instances sample from it
    published.load_state_dict(dict(learner.weights()))
    second = learner.update(sampled(published, sampling=sampling, batch=8, version=1, seed=1)).metrics
    assert second["mismatch/bit_equal_share"] == 1.0
    assert second["ratio_at_first_minibatch"] == 1.0
    assert second["reference_kl"] > 1e-6


def test_against_stale_samples_the_proximal_policy_is_the_engines_forward_at_no_further_cost(monkeypatch):
    """Of the newest version every weight is exactly 1; of the one before they are not, and ratios begin at 1."""
    published = target()
    fresh = sampled(published, sampling=SamplingParams(max_new_tokens=16), batch=4)
    learner, plain = learner_of(published, scorer_of(published)), learner_of(published, scorer_of(published))
    learner.algorithm = AlgorithmConfig(kind="grpo", correction=CorrectionConfig(kind="decoupled"))
    scored = []
    score = EngineScorer.logprobs
    monkeypatch.setattr(EngineScorer, "logprobs", lambda *args: scored.append(1) or score(*args))
    first = learner.update(fresh, recompute_old=True).metrics
    num_scored = len(scored)
    plain.update(fresh)
    assert len(scored) == 2 * num_scored
    assert first["mismatch/importance_mean"] == first["mismatch/ratio_max"] == 1.0
    ours, theirs = (dict(one.model.named_parameters()) for one in (learner, plain))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    second = learner.update(fresh, recompute_old=True).metrics
    assert second["mismatch/lag_max"] == 1.0 and second["ratio_at_first_minibatch"] == 1.0
    assert second["mismatch/bit_equal_share"] < 0.5 and second["mismatch/ratio_max"] > 1.001
    assert second["mismatch/kl"] > 0.0


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
    metrics = learner_of(changed, scorer_of(model)).update(rollouts).metrics
    assert metrics["mismatch/bit_equal_share"] < 0.1
    assert metrics["ratio_at_first_minibatch"] != 1.0


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
