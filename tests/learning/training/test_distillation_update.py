"""Updates that learn from a teacher: the plain divergence row by row, other prompts for it, and what is refused."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from pytest import approx, mark, raises
from tiny_llama import tiny_llama
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlhfspec.core.config import AlgorithmConfig, Config, TrainerConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.records import Rollout
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner

TEMPERATURE = 0.7
TEACHER_PROMPTS = ((3, 4, 5), (7,), (3, 4, 5), (3, 9), (7,), ())
"Empty: as the student, of a source that says nothing else to its teacher."


def learner_of(model, teacher, **algorithm) -> Learner:
    learner = Learner(
        model,
        algorithm=AlgorithmConfig(kind="distill", **algorithm),
        trainer=TrainerConfig(learning_rate=1e-2, minibatch_size=6, max_tokens_per_forward=24),
        temperature=TEMPERATURE,
        seed=5,
        pad_token_id=0,
    )
    learner.take_teacher(teacher)
    return learner


def wide_teacher():
    """Of another width, and another seed, than the student."""
    return tiny_llama(7, initializer_range=0.3, hidden_size=24, num_attention_heads=3, num_key_value_heads=3)


def capped_teacher():
    """Its logits are capped behind the head."""
    config = CONFIG_MAPPING["gemma2"](
        vocab_size=19, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=4.0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config)


def told(rollouts: Sequence[Rollout], prompts: Sequence[tuple[int, ...]]) -> list[Rollout]:
    return [
        dataclasses.replace(one, prompt=dataclasses.replace(one.prompt, teacher_ids=ids))
        for one, ids in zip(rollouts, prompts, strict=True)
    ]


def plain_loss(student, teacher, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The mean reverse divergence over all response tokens, one sample at a time, by the stock forward."""
    found = []
    for one in rollouts:
        response = one.completion.token_ids
        says = []
        for model, prompt in (
            (student, one.prompt.token_ids),
            (teacher, one.prompt.teacher_ids or one.prompt.token_ids),
        ):
            ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1, :19]
            says.append((logits / TEMPERATURE).log_softmax(-1))
        found.append((says[0].exp() * (says[0] - says[1].detach())).sum(-1))
    return torch.cat(found).mean()


@mark.parametrize("make_teacher", [wide_teacher, capped_teacher])
@mark.parametrize("prompts", [None, TEACHER_PROMPTS])
def test_an_update_steps_by_the_plain_divergence(
    make_model, make_rollouts, make_teacher: Callable, prompts: Sequence[tuple[int, ...]] | None
):
    student, teacher = make_model(), make_teacher()
    # samples of one prompt, whose beginnings are alike: they are predicted once where the teacher reads the same
    response = np.array([3, 5, 6])
    pairs = [(np.array([2, 3]), np.append(response, last)) for last in (1, 2, 2, 4, 5, 6)]
    rollouts = make_rollouts(student, temperature=TEMPERATURE, pairs=pairs, group_size=6)
    if prompts is not None:
        rollouts = told(rollouts, prompts)
    stock_student, stock_teacher = make_model(), make_teacher()
    loss = plain_loss(stock_student, stock_teacher, rollouts)
    loss.backward()
    learner = learner_of(student, teacher)
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
    learner.learning_rate = 1e-3
    report = learner.update(rollouts)
    assert report.metrics["distill_loss"] == approx(loss.item(), rel=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(stock_student.parameters(), 1.0)
    assert report.metrics["grad_norm"] == approx(float(norm), rel=1e-4)
    for ours, theirs in zip(learner.model.parameters(), stock_student.parameters(), strict=True):
        expected = theirs - 1e-3 * (torch.zeros_like(theirs) if theirs.grad is None else theirs.grad)
        assert (ours - expected).abs().max() < 1e-7


@mark.parametrize("settings", [{}, {"distill_beta": 0.0}, {"distill_beta": 0.5}, {"distill_top_k": 4}])
def test_the_student_comes_nearer(make_model, make_rollouts, settings):
    learner = learner_of(make_model(), wide_teacher(), **settings)
    rollouts = make_rollouts(learner.model, temperature=TEMPERATURE)
    values = [learner.update(rollouts).metrics["distill_loss"] for _ in range(6)]
    assert values[-1] < 0.7 * values[0]


def test_equal_rewards_beside_a_teacher_still_teach(make_model, make_rollouts):
    learner = learner_of(make_model(), wide_teacher(), advantage="group_std", distill_coef=0.1)
    report = learner.update(make_rollouts(learner.model, temperature=TEMPERATURE, reward=lambda tokens: 1.0))
    assert report.num_optimizer_steps == 1 and report.metrics["num_skipped_samples"] == 0


def test_rows_of_one_prompt_with_other_words_for_the_teacher_are_predicted_apart(make_model, make_rollouts):
    rollouts = make_rollouts(make_model(), pairs=[(np.array([2, 3]), np.array([4, 5]))] * 3, num=3)
    alike = collate(rollouts, pad_token_id=0).packed([0, 1, 2])
    apart = collate(told(rollouts, [(1, 2), (1,), (1, 2)]), pad_token_id=0).packed([0, 1, 2])
    assert len(alike.targets_once) == 2 and len(apart.targets_once) == 4
    assert apart.which_once[:2].tolist() == apart.which_once[4:].tolist()


def test_a_teacher_and_a_coefficient_go_together(make_model, make_rollouts):
    model = make_model()
    learner = Learner(
        model,
        algorithm=AlgorithmConfig(kind="distill"),
        trainer=TrainerConfig(),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
    )
    with raises(ConfigError, match="distill_coef is 1 and the learner has no teacher"):
        learner.update(make_rollouts(model))


def of_run(**given) -> Config:
    return Config.model_validate(
        {"data": {"task": "chain"}, "speculation": {"drafter": "none", "policy": "off"}, **given}
    )


@mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": {"kind": "distill"}}, "models.teacher is null and algorithm.distill_coef 1"),
        ({"models": {"teacher": "t"}}, "models.teacher is t and algorithm.distill_coef 0"),
        ({"algorithm": {"kind": "grpo", "distill_beta": 0.5}}, "distill_beta is of distill_coef"),
        ({"algorithm": {"kind": "distill", "clip_ratio": 0.3}}, "clip_ratio is of an advantage"),
        ({"algorithm": {"kind": "distill", "distill_coef": 0}}, "learns from no reward"),
        ({"reward": {"kind": "none"}}, "would all be equal"),
        (
            {"data": {"task": "chain", "teacher_prompt_template": "{prompt} {answer}"}},
            "models.teacher is null",
        ),
    ],
)
def test_what_does_nothing_is_refused(given, message):
    with raises(ValueError, match=message):
        of_run(**given)


def test_samples_of_a_teachers_student_may_be_stale():
    config = of_run(
        models={"teacher": "t"},
        algorithm={"kind": "distill"},
        rollout={"max_staleness": 1},
        reward={"kind": "none"},
    )
    assert config.rollout.max_staleness == 1


def test_without_a_reward_there_is_none():
    config = of_run(models={"teacher": "t"}, algorithm={"kind": "distill"})
    assert config.reward.kind == "none"
