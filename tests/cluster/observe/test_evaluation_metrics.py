"""pass@k equals its definition, and figures that a reward says nothing of are left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_rollouts import rollout

from rlhfspec.cluster.observe.iteration_metrics import evaluation_metrics, pass_at_k, with_evaluation
from rlhfspec.cluster.resume.run_state import EvaluationMarks
from rlhfspec.cluster.run.evaluate import Evaluator
from rlhfspec.core.metrics import require_declared
from rlhfspec.core.settings.evaluation import EvaluationConfig


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_one_that_passes(num_samples):
    for num_passed in range(num_samples + 1):
        passed = [True] * num_passed + [False] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            choices = [any(chosen) for chosen in combinations(passed, k)]
            estimate = pass_at_k(num_samples=num_samples, num_passed=num_passed, k=k)
            assert estimate == pytest.approx(np.mean(choices), abs=1e-12)


def test_pass_at_k_stays_finite_where_the_binomials_would_not():
    assert 0.0 < pass_at_k(num_samples=1024, num_passed=1, k=512) < 1.0


@pytest.mark.parametrize(("num_passed", "k"), [(3, 1), (0, 3), (0, 0), (-1, 1)])
def test_more_than_there_are_is_refused(num_passed, k):
    with pytest.raises(ValueError, match="expected k"):
        pass_at_k(num_samples=2, num_passed=num_passed, k=k)


def test_metrics_are_means_over_prompts():
    rollouts = [
        rollout(index, group=index // 4, reward=float(right), parts={"correct": float(right)}, num_tokens=3)
        for index, right in enumerate([1, 0, 0, 0, 0, 0, 0, 0])
    ]
    metrics = evaluation_metrics(rollouts)
    assert metrics["eval/accuracy"] == metrics["eval/mean_at_k"] == metrics["eval/pass_at_1"] == 0.125
    assert metrics["eval/pass_at_2"] == 0.25 and metrics["eval/pass_at_k"] == 0.5
    assert metrics["eval/best_at_k"] == 0.5 and metrics["eval/response_tokens_mean"] == 3.0
    assert (metrics["eval/num_prompts"], metrics["eval/num_samples"]) == (2, 8)


def test_without_a_part_that_says_what_is_right_in_every_reward_there_is_no_accuracy():
    rollouts = [rollout(0, parts={"correct": 1.0}), rollout(1, group=1, parts={})]
    metrics = evaluation_metrics(rollouts)
    assert not {"eval/accuracy", "eval/mean_at_k", "eval/pass_at_k", "eval/pass_at_1"} & metrics.keys()


def test_samples_without_a_reward_count_as_wrong_and_are_counted():
    rollouts = [rollout(0, parts={"correct": 1.0}), rollout(2, group=1, parts={"correct": 1.0})]
    metrics = evaluation_metrics(rollouts, skipped=[0, 1, 2, 2])
    assert (
        metrics["eval/accuracy"]
        == metrics["eval/mean_at_k"]
        == metrics["eval/pass_at_1"]
        == pytest.approx(1 / 3)
    )
    assert metrics["eval/pass_at_k"] == pytest.approx(2 / 3)
    assert [metrics[f"eval/num_{name}"] for name in ("prompts", "samples", "skipped")] == [3, 6, 4]
    require_declared(metrics)


def test_a_mixture_s_part_says_what_is_right_too():
    metrics = evaluation_metrics([rollout(0, parts={"form": 1.0, "maths": 0.2, "maths/correct": 0.0})])
    assert metrics["eval/accuracy"] == 0.0


def test_a_metric_that_the_rewards_do_not_have_gives_way_and_is_told():
    notes: list[str] = []
    settings = EvaluationConfig(every=1, metric="eval/accuracy")
    parts: Any = (
        SimpleNamespace(config=SimpleNamespace(evaluation=settings)),
        None,
        None,
        SimpleNamespace(note=notes.append),
        None,
    )
    evaluator = Evaluator(*parts)
    better = [evaluator._take_mark({"eval/reward_mean": value}) for value in (0.5, 0.4, 0.6)]
    assert better == [True, False, True]
    assert len(notes) == 1 and "chosen by eval/reward_mean" in notes[0]


def test_a_run_ends_after_so_many_evaluations_that_are_not_better_also_over_a_resume():
    def evaluator(marks: EvaluationMarks | None = None, patience: int | None = 2) -> Evaluator:
        settings = EvaluationConfig(every=1, early_stopping_patience=patience)
        parts: Any = SimpleNamespace(config=SimpleNamespace(evaluation=settings)), None, None, None, None
        return Evaluator(*parts, marks)

    first = evaluator()
    for value in (0.5, 0.4, 0.6, 0.6):
        first._take_mark({"eval/reward_mean": value})
        assert first.reason_to_stop is None
    resumed = evaluator(replace(first.marks, num_done=0))
    resumed._take_mark({"eval/reward_mean": 0.1})
    assert "above its best, 0.6, in 2 evaluations" in str(resumed.reason_to_stop)
    assert evaluator(replace(resumed.marks, num_done=0), patience=None).reason_to_stop is None


def test_mfu_of_the_wall_clock_counts_all_seconds_of_the_iteration() -> None:
    seconds = {
        "time/iteration_s": 9.0,
        "time/generate_s": 5.0,
        "update/forward_s": 1.0,
        "update/backward_s": 3.0,
    }
    metrics = with_evaluation(seconds | {"update/mfu_fwd_bwd": 0.5}, {"time/evaluate_s": 1.0})
    assert metrics["update/mfu_wall"] == pytest.approx(0.5 * 4.0 / 10.0)
    assert "update/mfu_wall" not in with_evaluation(seconds, {})
