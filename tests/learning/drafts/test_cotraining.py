"""Co-training: the draft model learns from the update's own logits, and the target's stays what it was."""

import copy

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama
from torch.distributions import Categorical, kl_divergence

from rlhfspec.core.config import AlgorithmConfig, DrafterTrainingConfig, TrainerConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.records import UpdateReport
from rlhfspec.engine.decoding.logprobs import scaled_logits
from rlhfspec.learning.drafts.cotraining import DraftCotrainer
from rlhfspec.learning.drafts.draft_learner import DraftTerms
from rlhfspec.learning.drafts.soft_targets import whole_kl
from rlhfspec.learning.models.demo_pair import sample_responses
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.training_forward import prepare_for_training, response_logits
from tests.learning.conftest import tiny_model

TEMPERATURE = 0.8


def new_cotrainer(model=None, **settings) -> DraftCotrainer:
    return DraftCotrainer(
        model or tiny_llama(7, hidden_size=8, initializer_range=0.3),
        DraftTerms(
            settings=DrafterTrainingConfig(**{"mode": "cotrain", "learning_rate": 3e-3} | settings),
            temperature=TEMPERATURE,
            vocab_size=19,
        ),
    )


def new_learner(cotrainer=None, **trainer) -> Learner:
    learner = Learner(
        tiny_model(),
        algorithm=AlgorithmConfig(kind="grpo", entropy_coef=1e-3),
        trainer=TrainerConfig(**{"learning_rate": 1e-3, "minibatch_size": 4, "num_threads": 1} | trainer),
        temperature=TEMPERATURE,
        seed=5,
        pad_token_id=0,
        vocab_size=19,
        observers=[] if cotrainer is None else [cotrainer],
    )
    return learner


def weights_of(owner):
    return {name: tensor.clone() for name, tensor in owner.weights()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def sampled(make_rollouts, num=24, *, seed=0):
    """Rollouts whose responses the target sampled."""
    model = tiny_model()
    prompts = [np.random.default_rng([seed, i]).integers(2, 19, size=3) for i in range(num)]
    responses = sample_responses(model, prompts, max_new_tokens=10, eos_token_id=1, pad_token_id=0, seed=seed)
    pairs = list(zip(prompts, responses, strict=True))
    return make_rollouts(model, num, group_size=4, pairs=pairs, temperature=TEMPERATURE)


def logits_at(model, rollouts):
    """Logits over the temperature at all response tokens, by a forward of its own."""
    packed = collate(rollouts, pad_token_id=0).packed(range(len(rollouts)))
    prepare_for_training(model, gradient_checkpointing=False)
    return Categorical(logits=scaled_logits(response_logits(model, packed, 19)[0], TEMPERATURE))


@torch.no_grad()
def divergence(target, draft, rollouts):
    return float(kl_divergence(logits_at(target, rollouts), logits_at(draft, rollouts)).mean())


def test_the_targets_update_is_the_same_to_the_bit_and_takes_no_further_forward(make_rollouts):
    rollouts = sampled(make_rollouts)

    def updated(cotrainer) -> tuple[dict, UpdateReport, int]:
        learner = new_learner(cotrainer)
        forwards = []
        learner.model.register_forward_hook(lambda *_: forwards.append(1))
        learner.update(rollouts)
        report = learner.update(rollouts)
        return weights_of(learner), report, len(forwards)

    cotrainer = new_cotrainer()
    before = weights_of(cotrainer)
    weights, report, num_forwards = updated(cotrainer)
    expected, plain, num_expected = updated(None)
    assert same(weights, expected) and num_forwards == num_expected
    assert plain.metrics == {name: value for name, value in report.metrics.items() if "draft/" not in name}
    assert report.metrics["draft/cotrain_kl"] > 0.0
    assert not same(weights_of(cotrainer), before) and cotrainer.weight_version == 2


def test_the_draft_comes_nearer_to_the_target_on_responses_it_has_not_seen(make_rollouts):
    cotrainer = new_cotrainer(learning_rate=1e-2)
    learner = new_learner(cotrainer, learning_rate=1e-4)
    held_out = sampled(make_rollouts, 16, seed=1)
    draft = cotrainer.model
    before = divergence(learner.model, draft, held_out)
    seen = [learner.update(sampled(make_rollouts, seed=2 + i)).metrics["draft/cotrain_kl"] for i in range(8)]
    assert seen[-1] < 0.7 * seen[0]
    assert divergence(learner.model, draft, held_out) < 0.7 * before


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [16, 4096])
def test_a_minibatch_is_one_step_on_its_mean_however_it_is_packed(make_rollouts, max_tokens, monkeypatch):
    rollouts = sampled(make_rollouts, 8)
    cotrainer = new_cotrainer()
    learner = new_learner(cotrainer, minibatch_size=8, max_tokens_per_forward=max_tokens)
    draft = copy.deepcopy(cotrainer.model)
    with torch.no_grad():
        teacher = logits_at(learner.model, rollouts)
    kl_divergence(teacher, logits_at(draft, rollouts)).mean().backward()
    found = []
    trainer = cotrainer._trainer
    monkeypatch.setattr(trainer, "take_step", lambda _: found.append(gradients(trainer.model)))
    learner.update(rollouts)
    assert len(found) == 1
    for name, gradient in gradients(draft).items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-3, atol=1e-6)


def test_what_the_target_never_says_has_no_part():
    teacher = torch.tensor([[0.0, float("-inf"), 1.0]])
    student = torch.tensor([[0.0, -3.0, 0.5]], requires_grad=True)
    found = whole_kl(teacher, student)
    torch.testing.assert_close(found, kl_divergence(Categorical(logits=teacher), Categorical(logits=student)))
    found.sum().backward()
    assert student.grad is not None and torch.isfinite(student.grad).all()


def test_a_draft_that_is_not_finite_is_given_up_and_the_target_learns_on(make_rollouts):
    rollouts = sampled(make_rollouts)
    broken = new_cotrainer()
    with torch.no_grad():
        broken.model.get_output_embeddings().weight.fill_(float("inf"))
    before = weights_of(broken)
    learner, plain = new_learner(broken), new_learner()
    assert "draft/cotrain_kl" not in learner.update(rollouts).metrics
    plain.update(rollouts)
    assert same(weights_of(learner), weights_of(plain))
    assert broken.weight_version == 0 and same(weights_of(broken), before)
    assert broken.refit().outcome == "not_finite"


def test_an_update_is_told_of_once_as_a_refit_is(make_rollouts):
    cotrainer = new_cotrainer()
    new_learner(cotrainer).update(sampled(make_rollouts))
    told = cotrainer.refit([], budget_s=1.0)
    assert (
        told.outcome == "taken" and told.weight_version == 1 and told.num_steps == 6 and told.num_tokens > 24
    )
    assert cotrainer.refit([], budget_s=1.0).outcome == "no_time"


def test_it_goes_on_where_it_was_saved(make_rollouts, tmp_path):
    rollouts = sampled(make_rollouts)
    draft, same_draft = new_cotrainer(), new_cotrainer(tiny_llama(9, hidden_size=8))
    learner, resumed = new_learner(draft), new_learner(same_draft)
    learner.update(rollouts)
    (tmp_path / "target").mkdir()
    learner.save(tmp_path / "target")
    draft.save(tmp_path / "draft")
    resumed.load(tmp_path / "target")
    same_draft.load(tmp_path / "draft")
    for one in (learner, resumed):
        one.update(rollouts)
    assert same_draft.weight_version == draft.weight_version == 2
    assert same(weights_of(same_draft), weights_of(draft))
    with pytest.raises(ConfigError, match="other weights than this one"):
        new_cotrainer(tiny_llama(9, hidden_size=16)).load(tmp_path / "draft")
