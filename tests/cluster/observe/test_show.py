"""`rlhfspec show`: one run or several, whatever state their folders are in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_rollouts import rollout

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.iteration_logs import write_histograms
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.rollouts import write_rollouts
from rlhfspec.cluster.observe.show_tables import curve
from rlhfspec.cluster.observe.summary import amdahl_bound
from rlhfspec.core.config_io import config_from_dict

CONFIG = config_from_dict({"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}})


def make_run(folder: Path, *, gain: float = 0.1, iterations: int = 5) -> RunDir:
    run_dir = RunDir.create(CONFIG, folder)
    rows = [
        {
            "iteration": i,
            "reward/mean": gain * (i + 1),
            "rollout/num_samples": 8,
            "time/generate_s": 3.0,
            "time/update_s": 1.0,
            "time/iteration_s": 4.0,
        }
        for i in range(iterations)
    ]
    run_dir.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [{"num_iterations": i, "eval/reward_mean": 0.1 * i, "is_best": 1.0} for i in (0, 5)]
    run_dir.evaluations_file.write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "one")


def shown(capsys, *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_run_is_drawn_with_curves_histograms_and_what_faster_generation_would_give(run_dir, capsys):
    write_histograms(run_dir.histograms_file, 4, {"reward": [0.0, 0.5, 0.5]})
    text = shown(capsys, run_dir.path)
    assert "▁▃▅▆█" in text and "histograms of iteration 5" in text and "eval/reward_mean" in text
    assert "1.60 x if 2 x as fast, 4.00 x if free" in text


def test_several_runs_stand_side_by_side_with_ratios_to_the_first(run_dir, tmp_path, capsys):
    other = make_run(tmp_path / "two", gain=0.2, iterations=10)
    text = shown(capsys, run_dir.path, other.path)
    # last fifth: 0.5 of five, (1.8 + 2.0) / 2 of ten
    assert "0.5" in text and "1.9 (3.80 x)" in text and "75%" in text and "4.00 x" in text


def test_json_is_one_object_with_series_and_means(run_dir, capsys):
    tree = json.loads(shown(capsys, run_dir.path, "--json", "--metric", "reward/*", "--metric", "eval/*"))
    (one,) = tree["runs"]
    assert one["num_iterations"] == 5 and one["amdahl_bound"] == 4.0 and one["state"] == "running"
    assert set(one["metrics"]) == {"reward/mean", "eval/reward_mean"}
    assert one["metrics"]["eval/reward_mean"]["iterations"] == [0, 5]


def test_samples_are_those_of_the_last_iteration_that_can_be_read(run_dir, capsys):
    write_rollouts(run_dir.rollouts_file(0), [rollout(0, reward=1.0, response="[bold] *a*")], [0.25])
    run_dir.rollouts_file(1).write_bytes(b"PAR1 cut")
    text = shown(capsys, run_dir.path, "--samples")
    assert "iteration 1" in text and "[bold] *a*" in text and "advantage +0.250" in text


@pytest.mark.parametrize("damage", [b"", b'{"iteration": 0, "rewa', b"\0" * 64, b'{"reward/mean": 1.0}\n'])
def test_of_a_run_that_was_cut_short_what_can_be_read_is_shown(run_dir, capsys, damage):
    for file in (run_dir.metrics_file, run_dir.evaluations_file, run_dir.histograms_file):
        file.write_bytes(damage)
    run_dir.status_file.write_bytes(damage)
    text = shown(capsys, run_dir.path, "--json")
    assert json.loads(text)["runs"][0]["num_iterations"] == 0
    assert "no iteration finished" in shown(capsys, run_dir.path)
    assert "iterations" in shown(capsys, run_dir.path, run_dir.path)


def test_a_run_of_an_older_version_without_the_newer_files_is_shown(run_dir, capsys):
    run_dir.evaluations_file.unlink()
    run_dir.status_file.unlink()
    assert "mean reward, first to last fifth" in shown(capsys, run_dir.path)


@pytest.mark.parametrize("status", [b"", b"\xff\x00", b'{"state": "run', b"[1]", b'{"a": 1}', b"[" * 100_000])
def test_what_is_left_of_a_damaged_folder_is_shown(run_dir, capsys, status):
    (run_dir.path / "config.yaml").write_bytes(b"\xff\x00binary")
    run_dir.status_file.write_bytes(status)
    run_dir.metrics_file.write_text(run_dir.metrics_file.read_text().rstrip() + '\n{"iteration": 10, "rew')
    assert main(["show", str(run_dir.path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("state unknown") and "is cut or damaged and left out" in out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--metric", "reward/men"], "is called reward/men; they have eval/reward_mean, reward/mean"),
        (["--samples"], "has no samples in its rollouts folder"),
        (["--samples", "--iteration", "0"], "has no samples of iteration 0"),
    ],
)
def test_what_cannot_be_shown_is_said_with_exit_code_2(run_dir, capsys, arguments, what):
    assert main(["show", str(run_dir.path), *arguments]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~no-such-user/run"])
def test_show_of_what_cannot_be_a_folder_is_one_error(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["show", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_a_curve_averages_neighbours_and_survives_constants():
    assert curve([1.0] * 3) == "▄▄▄" and curve([]) == ""
    assert curve([0.0] * 50 + [1.0] * 50, width=2) == "▁█"


def test_amdahls_bound_is_total_over_what_is_left():
    assert amdahl_bound(10.0, 5.0) == 2.0 and amdahl_bound(10.0, 0.0) == 1.0
    assert amdahl_bound(10.0, 5.0, times=5.0) == pytest.approx(10.0 / 6.0)
    assert amdahl_bound(0.0, 0.0) < float("inf")
