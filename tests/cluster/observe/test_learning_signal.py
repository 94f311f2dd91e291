"""An iteration that can teach nothing is told with its reason: figures of real updates of a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
from made_rollouts import rollout
from tiny_llama import tiny_llama

from rlhfspec.cluster.observe.console import describe_metrics
from rlhfspec.cluster.observe.iteration_metrics import distribution_metrics, iteration_metrics
from rlhfspec.cluster.observe.summary import UPDATE_PARTS, signal_line, summarise, update_line, with_signal
from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.metrics import require_declared
from rlhfspec.core.records import Rollout
from rlhfspec.learning.training.learner import Learner

SECONDS = dict.fromkeys(("generate", "score", "update", "publish", "refit", "evaluate", "iteration"), 1.0)


def metrics_of(
    rollouts: list[Rollout], teacher_seed: int | None = None, **algorithm: object
) -> dict[str, float]:
    """What a run writes of an iteration that learned from these."""
    learner = Learner(
        tiny_llama(0),
        algorithm=AlgorithmConfig.model_validate({"kl_coef": 0.0, **algorithm}),
        trainer=TrainerConfig(minibatch_size=4),
        temperature=1.0,
        seed=0,
        pad_token_id=0,
    )
    if teacher_seed is not None:
        learner.take_teacher(tiny_llama(teacher_seed))
    update = learner.update(rollouts)
    metrics = iteration_metrics(rollouts, GenerationStats(), update, SECONDS)
    metrics |= distribution_metrics(rollouts, update.sample_advantages)
    metrics["learner/num_optimizer_steps"] = float(update.num_optimizer_steps)
    return with_signal(metrics)


def batch(rewards: list[float], num_cut: int = 0) -> list[Rollout]:
    """Two samples of each prompt; the first ones are cut."""
    return [
        rollout(2 + index, group=index // 2, reward=reward, is_cut=index < num_cut)
        for index, reward in enumerate(rewards)
    ]


MIXED, EQUAL, IN_GROUPS = [0.0, 1.0, 1.0, 0.0], [0.5] * 4, [0.0, 0.0, 1.0, 1.0]
SILENT = [
    ({"kind": "grpo"}, batch(EQUAL), "all rewards are equal; see in samples/"),
    ({"kind": "ppo"}, batch(EQUAL), "all rewards are equal; see in samples/"),
    ({"kind": "grpo", "kl_coef": 0.1}, batch(EQUAL), "all rewards are equal; see in samples/"),
    (
        {"kind": "grpo"},
        batch(IN_GROUPS),
        "the rewards of no prompt's responses differ; raise rollout.samples",
    ),
    (
        {"kind": "dapo", "truncated": "mask"},
        batch(MIXED, 4),
        "the gradient is 0, 100% of the responses were cut",
    ),
    ({"kind": "grpo", "truncated": "mask"}, batch(EQUAL, 4), "all rewards are equal, 100% of the responses"),
]


@pytest.mark.parametrize(("algorithm", "rollouts", "reason"), SILENT)
def test_an_iteration_that_teaches_nothing_says_why(algorithm, rollouts, reason) -> None:
    metrics = metrics_of(rollouts, **algorithm)
    require_declared(metrics)
    assert metrics["learner/no_signal"] == 1.0
    line = signal_line(4, metrics)
    assert line is not None and line.startswith(f"iteration 5: its rewards taught nothing: {reason}")
    assert "\n" not in line


@pytest.mark.parametrize("kind", ["grpo", "ppo", "reinforce_pp"])
def test_an_iteration_that_teaches_says_nothing(kind) -> None:
    metrics = metrics_of(batch(MIXED, 2), kind=kind)
    assert metrics["learner/no_signal"] == 0.0 and signal_line(0, metrics) is None


def test_mostly_cut_responses_are_told_even_where_they_teach() -> None:
    metrics = metrics_of(batch(MIXED, 3), kind="grpo")
    assert metrics["learner/no_signal"] == 0.0
    line = signal_line(0, metrics)
    assert line is not None and "75% of the responses were cut at sampling.max_new_tokens; raise it" in line


def test_one_sample_alone_is_no_equal_reward() -> None:
    assert metrics_of(batch([1.0]), kind="ppo")["learner/no_signal"] == 0.0


def test_the_summary_counts_reasons_from_the_metrics_alone() -> None:
    rows = [metrics_of(batch(EQUAL), kind="grpo") for _ in range(2)]
    rows += [metrics_of(batch(IN_GROUPS, 4), kind="grpo"), metrics_of(batch(MIXED), kind="grpo")]
    for row in rows:
        # a folder of an earlier version does not say it
        del row["learner/no_signal"]
    summary = summarise(rows)
    assert summary is not None
    told = dict(summary.rows())
    assert told["rewards taught nothing"] == (
        "3 of 4 iterations: all rewards are equal (2), the rewards of no prompt's responses differ (1)"
    )
    assert told["most responses cut"].startswith("1 of 4 iterations")
    of_judge = summarise([row | {"reward/style/unread": 0.25 * at} for at, row in enumerate(rows)])
    assert of_judge is not None
    assert ("judge's answers unread", "3 of 4 iterations, at most 75.0% of one's") in of_judge.signal
    well = summarise(rows[3:])
    assert well is not None and not well.signal


def test_a_rate_of_zero_and_a_mask_of_everything_are_named() -> None:
    metrics = metrics_of(batch(MIXED), kind="grpo")
    assert "the learning rate is 0" in str(signal_line(0, metrics | {"learner/lr": 0.0}))
    masked = metrics | {"mismatch/masked_share": 1.0, "learner/grad_norm": 0.0}
    assert "algorithm.correction masks every token" in str(signal_line(0, masked))
    assert np.isclose(metrics["learner/lr"], 1e-5)


def test_the_parts_of_an_update_are_told_and_what_slows_it() -> None:
    metrics = metrics_of(batch(MIXED), kind="ppo", kl_coef=0.1)
    timed = {name for name in metrics if name.startswith("update/") and name.endswith("_s")} - {
        "update/tokens_per_s"
    }
    assert timed == {
        f"update/{part}_s" for part in UPDATE_PARTS if part not in ("outside", "scoring", "teacher")
    }
    require_declared(metrics)
    parts = {f"update/{part}_s": 0.0 for part in UPDATE_PARTS} | {
        "update/num_packs": 2.0,
        "update/num_tokens": 4e3,
    }
    even = parts | {"update/forward_s": 3.0, "update/backward_s": 6.0, "update/checks_s": 1.0}
    assert update_line([even, even]) == "backward 60%, forward 30%, checks 10%"
    for part, word in {
        "outside": "waits",
        "advantages": "value_epochs",
        "optimizer": "minibatch_size",
    }.items():
        assert word in str(update_line([even | {f"update/{part}_s": 5.0}])), part
    assert "gradient_checkpointing" in str(update_line([even | {"update/backward_s": 9.0}]))
    assert "packs of 20 tokens" in str(update_line([even | {"update/num_tokens": 40.0}]))
    idle = parts | {"update/num_packs": 0.0, "update/num_tokens": 0.0, "update/first_forwards_s": 3.0}
    assert update_line([idle | {"update/collate_s": 9.0}]) == "collate 75%, first forwards 25%"
    assert update_line([{"time/update_s": 1.0}]) is None


@pytest.mark.parametrize(("teacher_seed", "told"), [(0, True), (1, False)])
def test_a_teacher_that_says_what_its_student_says_is_named(teacher_seed, told):
    row = metrics_of(batch(EQUAL), teacher_seed, kind="distill")
    assert ("the teacher says what the student says" in (signal_line(1, row) or "")) == told


def test_what_a_teacher_teaches_stands_in_place_of_equal_rewards():
    row = metrics_of(batch(EQUAL), 1, kind="distill") | {"time/iteration_s": 2.0}
    assert describe_metrics(row).startswith(f"distill_loss {row['learner/distill_loss']:.3f}  ")
    both = metrics_of(batch(MIXED), 1, kind="grpo", distill_coef=0.5)
    assert describe_metrics(both).startswith(f"reward 0.500  distill_loss {both['learner/distill_loss']:.3f}")
    found = summarise([row])
    assert found is not None
    shown = f"{row['learner/distill_loss']:.4f}"
    assert ("distill_loss, first to last fifth", f"{shown} to {shown} nats a token") in found.rows()
