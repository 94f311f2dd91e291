"""Samples for people: best, worst and random ones, none twice, and nothing in them breaks the page."""

from __future__ import annotations

import pytest
from made_rollouts import rollout

from rlhfspec.cluster.folder.sample_table import SampleRow, as_markdown, choose_samples
from rlhfspec.cluster.observe.iteration_metrics import distribution_metrics

ROLLOUTS = [rollout(index, reward=float(index % 7), parts={"length": 2.0}) for index in range(20)]
ROWS = [SampleRow.of(one, advantage=0.5) for one in ROLLOUTS]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 19, 20, 50])
def test_as_many_as_asked_for_and_none_twice(count):
    chosen = choose_samples(ROWS, count, seed=1)
    assert len({row.sample_index for _, row in chosen}) == len(chosen) == min(count, len(ROWS))


def test_best_and_worst_are_what_they_say_and_random_ones_follow_the_seed():
    chosen = choose_samples(ROWS, 9, seed=1)
    rewards = {
        why: [row.reward for name, row in chosen if name == why] for why in ("best", "worst", "random")
    }
    assert rewards["best"] == [6.0, 6.0, 5.0] and rewards["worst"] == [0.0, 0.0, 0.0]
    assert chosen == choose_samples(ROWS, 9, seed=1) != choose_samples(ROWS, 9, seed=2)


def test_none_is_best_where_all_rewards_are_equal():
    rows = [SampleRow.of(rollout(index, reward=0.5), advantage=0.0) for index in range(9)]
    chosen = choose_samples(rows, 4, seed=1)
    assert {why for why, _ in chosen} == {"random"} and len(chosen) == 4


def test_no_text_leaves_its_fence():
    row = SampleRow.of(rollout(prompt="# not a heading", response="```python\n````\nx"), advantage=None)
    text = as_markdown("Iteration 1", [("best", row)])
    assert "`````text\n```python\n````\nx\n`````" in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Iteration 1",
        "## Sample 0 (best)",
        "# not a heading",
    ]


def test_a_long_text_is_cut_and_says_by_how_much():
    row = SampleRow.of(rollout(response="x" * 5000), advantage=0.25)
    text = as_markdown("t", [("best", row)])
    assert "(1,000 more characters)" in text and "advantage +0.250" in text


def test_metrics_of_a_distribution():
    rollouts = [rollout(i, reward=float(i), num_tokens=i + 1, is_cut=i == 9) for i in range(10)]
    metrics = distribution_metrics(rollouts, [float(i - 2) for i in range(10)])
    assert metrics["rollout/length_cut_share"] == 0.1
    assert metrics["rollout/response_tokens_p50"] == 5.5 and metrics["reward/p90"] == pytest.approx(8.1)
    assert (metrics["learner/advantage_min"], metrics["learner/advantage_max"]) == (-2.0, 7.0)
    assert "learner/advantage_mean" not in distribution_metrics(rollouts, None)
