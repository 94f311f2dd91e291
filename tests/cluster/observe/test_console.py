"""What a person sees of a run: plain lines without a terminal, a summary from the metrics alone."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console

from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.observe.summary import summarise


def metrics(iteration: int, reward: float) -> dict[str, float]:
    return {
        "iteration": iteration,
        "reward/mean": reward,
        "reward/accuracy": reward / 2,
        "rollout/num_samples": 8,
        "rollout/response_tokens_mean": 25.0,
        "rollout/mean_acceptance_length": 3.0,
        "rollout/acceptance_rate": 0.45 + 0.01 * iteration,
        "rollout/goodput_tokens_per_s": 100.0,
        "time/generate_s": 2.0,
        "time/score_s": 0.5,
        "time/update_s": 1.0,
        "time/publish_s": 0.25,
        "time/refit_s": 0.125,
        "time/iteration_s": 4.0,
    }


TEN = [metrics(i, reward=0.1 * i) for i in range(10)]


def text_reporter(*, terminal: bool) -> tuple[Reporter, io.StringIO]:
    text = io.StringIO()
    return Reporter(Console(file=text, force_terminal=terminal, width=200, highlight=False)), text


def test_the_summary_follows_from_the_metrics() -> None:
    summary = summarise(TEN)
    assert summary is not None
    assert summary.num_iterations == 10
    assert summary.num_samples == 80
    assert summary.num_response_tokens == 2000
    assert summary.reward_first == pytest.approx(0.05)  # iterations 0 and 1
    assert summary.reward_last == pytest.approx(0.85)  # iterations 8 and 9
    assert summary.reward_gain == pytest.approx(0.80)
    assert summary.goodput_tokens_per_s == pytest.approx(100.0)  # 2000 tokens in 20 s of generation
    parts = {
        "generate": 20.0,
        "score": 5.0,
        "update": 10.0,
        "publish": 2.5,
        "refit": 1.25,
        "other": 1.25,
        "evaluate": 0.0,
    }
    assert summary.part_s == parts
    assert summary.amdahl_bound == pytest.approx(2.0)  # 40 s, 20 of them generation
    assert summary.acceptance_first == pytest.approx(0.455)
    assert summary.acceptance_last == pytest.approx(0.535)


def test_the_summary_counts_moved_samples_where_there_were_any() -> None:
    moved = summarise([row | {"moves/num_moved": 2.0} for row in TEN])
    assert moved is not None and ("samples moved", "20") in moved.rows()
    none = summarise([row | {"moves/num_moved": 0.0, "moves/num_kept": 1.0} for row in TEN])
    assert none is not None and "samples moved" not in [label for label, _ in none.rows()]


def test_the_summary_says_how_long_the_start_took_of_the_last_process() -> None:
    resumed = summarise([TEN[0] | {"time/start_up_s": 30.0}, *TEN[1:5], TEN[5] | {"time/start_up_s": 20.0}])
    assert resumed is not None and ("start-up", "20.0 s, before the first iteration") in resumed.rows()


def test_a_reporter_knows_how_long_the_start_took() -> None:
    times = iter([10.0, 25.0, 99.0])
    report = Reporter(Console(file=io.StringIO()), clock=lambda: next(times))
    report.start(2)
    report.start(2, done=1)
    assert report.start_up_s == 15.0, "a restart's is the run's own"


def test_a_reporter_knows_how_long_each_stage_took() -> None:
    times = iter([0.0, 1.0, 3.0, 3.0, 8.0, 8.0, 10.0, 10.0])
    report = Reporter(Console(file=io.StringIO()), clock=lambda: next(times))
    report.stage("reading")
    report.stage("starting")
    report.stop()
    report.stage("reading")
    report.start(2)
    assert report.stages_s == {"reading": 4.0, "starting": 5.0} and report.start_up_s == 10.0


def test_on_a_terminal_a_stage_shows_what_it_waits_for_and_elsewhere_a_reporter_cannot() -> None:
    report, text = text_reporter(terminal=True)
    report.stage("starting Ray")
    assert report.awaits is not None
    report.awaits("waiting for gen-0; 3 s so far")
    report.stop()
    report.awaits("nobody")
    assert (
        "starting Ray: waiting for gen-0; 3 s so far" in text.getvalue() and "nobody" not in text.getvalue()
    )
    assert text_reporter(terminal=False)[0].awaits is None


def test_no_iteration_gives_no_summary() -> None:
    assert summarise([]) is None


def test_a_run_without_accuracy_has_no_accuracy_row() -> None:
    rows = [{k: v for k, v in row.items() if k != "reward/accuracy"} for row in TEN]
    summary = summarise(rows)
    assert summary is not None and summary.accuracy_last is None
    assert not any("accuracy" in label for label, _ in summary.rows())


def test_without_a_terminal_every_iteration_is_one_plain_line() -> None:
    report, text = text_reporter(terminal=False)
    report.start(10)
    report.iteration(3, TEN[3])
    report.stop()
    line = text.getvalue().strip()
    assert line == "iteration 4/10  reward 0.300  accepts 3.00  100 tokens/s  4.0 s  about 24 s left"


@pytest.mark.parametrize(
    ("num_moved", "said"), [(3.0, "100 tokens/s  3 moves  4.0 s"), (0.0, "100 tokens/s  4.0 s")]
)
def test_the_line_counts_moves_when_there_were_any(num_moved: float, said: str) -> None:
    report, text = text_reporter(terminal=False)
    report.start(10)
    report.iteration(3, TEN[3] | {"moves/num_moved": num_moved, "moves/num_kept": 2.0})
    assert said in text.getvalue()


def test_on_a_terminal_the_bar_shows_reward_acceptance_and_goodput() -> None:
    report, text = text_reporter(terminal=True)
    report.start(10)
    report.progress("generate", 3, 8)
    report.iteration(0, TEN[0])
    report.stop()
    for part in ("1/10", "reward 0.000", "accepts 3.00", "100 tokens/s"):
        assert part in text.getvalue()


def test_without_a_terminal_progress_is_printed_at_every_stage_and_every_ten_seconds() -> None:
    report, text = text_reporter(terminal=False)
    now_s = itertools.count(100.0, 3.0)
    report.clock = lambda: next(now_s)
    with report.job("pair") as tick:
        for percent in range(0, 90, 10):
            tick("training", percent / 100)
        tick("distilling", 0.9)
    assert text.getvalue().splitlines() == [
        "pair: training (0%)",
        "pair: training (40%)",
        "pair: training (80%)",
        "pair: distilling (90%)",
    ]
