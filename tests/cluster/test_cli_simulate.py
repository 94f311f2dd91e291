"""`rlhfspec simulate`: tables, JSON, recorded lengths, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hand_profile import hand_cost, hand_profile
from refused_command import refused

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.rollouts import read_lengths
from rlhfspec.core.errors import DataError
from rlhfspec.profiles.profile import save_profile

SMALL = ("simulate", "--instances", "2", "--slots", "4", "--samples", "16", "--max-new-tokens", "128")


def test_it_compares_every_policy_and_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "simulated.json"
    assert main([*SMALL, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "not measured" in shown
    tree = json.loads(out.read_text())
    assert list(tree["policies"]) == ["static", "pull", "recompute_only", "paper_rule", "finish_time"]
    for name, metrics in tree["policies"].items():
        assert name in shown
        assert f"{metrics['finish_s']:.2f}" in shown
        assert metrics["finish_s"] >= tree["bound_s"]
        assert len(metrics["busy_s"]) == 2
    assert tree["policies"]["static"]["over_static"] == 1.0
    assert tree["num_samples"] == 16


def test_equal_seeds_give_equal_metrics_and_others_do_not(tmp_path: Path) -> None:
    trees = []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / f"{number}.json"
        assert main([*SMALL, "--policy", "finish_time", "--seed", str(seed), "--out", str(out)]) == 0
        trees.append(json.loads(out.read_text()))
    assert trees[0] == trees[1]
    assert trees[0]["policies"] != trees[2]["policies"]
    assert list(trees[0]["policies"]) == ["static", "pull", "finish_time"]


def test_a_profile_gives_the_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    save_profile(hand_profile(0.8, hand_cost(forward_ms=10.0)), folder)
    assert main([*SMALL, "--policy", "static", "--profile", str(folder)]) == 0
    assert "profile of the target_model on the device" in capsys.readouterr().out
    assert "no profile at" in refused(capsys, *SMALL, "--profile", tmp_path / "none")


def test_recorded_lengths_are_those_of_the_file(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts.parquet"
    tokens = [[1, 2, 3], [4], [5, 6]]
    pq.write_table(
        pa.table({"response_token_ids": pa.array(tokens, type=pa.list_(pa.int32())), "reward": [0.0] * 3}),
        rollouts,
    )
    assert read_lengths(rollouts).tolist() == [3, 1, 2]
    numbers = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"response_tokens": [30, 10]}), numbers)
    assert read_lengths(numbers).tolist() == [30, 10]
    lines = tmp_path / "lengths.jsonl"
    lines.write_text('7\n{"response_tokens": 9}\n\n{"response_token_ids": [1, 2]}\n')
    assert read_lengths(lines).tolist() == [7, 9, 2]
    out = tmp_path / "out.json"
    assert main([*SMALL[:5], "--lengths", str(lines), "--policy", "pull", "--out", str(out)]) == 0
    tree = json.loads(out.read_text())
    assert (tree["num_samples"], tree["num_tokens"], tree["max_new_tokens"]) == (3, 18, 9)


@pytest.mark.parametrize(
    "text", ["x", "1.5", "true", '{"length": 3}', '{"response_token_ids": "abc"}', f"{10**23}", "0", ""]
)
def test_lines_that_are_no_lengths_are_refused(text: str, tmp_path: Path) -> None:
    lines = tmp_path / "lengths.jsonl"
    lines.write_text(f"{text}\n")
    with pytest.raises(DataError, match="length"):
        read_lengths(lines)


def test_files_that_hold_something_else_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"reward": np.zeros(2)}), other)
    with pytest.raises(DataError, match="response_token_ids"):
        read_lengths(other)
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet")
    with pytest.raises(DataError, match="expected a Parquet file"):
        read_lengths(broken)


def test_bad_arguments_are_one_error_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--instances" in refused(capsys, "simulate", "--instances", "0")
    assert "--poll" in refused(capsys, *SMALL, "--poll", "0")
    assert "--speed-sigma" in refused(capsys, *SMALL, "--speed-sigma", "-1")
    assert "no file of lengths" in refused(capsys, *SMALL, "--lengths", "shaped")
    assert "does not exist" in refused(capsys, *SMALL, "--out", tmp_path / "none" / "out.json")
    assert "is a folder" in refused(capsys, *SMALL, "--out", tmp_path)
    lines = tmp_path / "lengths.jsonl"
    lines.write_text("7\n")
    assert "holds 1 lengths only" in refused(capsys, *SMALL, "--lengths", lines)


def test_bytes_that_are_no_text_are_no_lengths(tmp_path: Path) -> None:
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="expected JSON lines"):
        read_lengths(binary)


@pytest.mark.parametrize(
    "option",
    [
        "--speed-sigma=nan",
        "--speed-sigma=1e6",
        "--poll=1e-9",
        "--samples=99999999999",
        "--slots=0",
        "--seed=-1",
    ],
)
def test_numbers_that_nothing_simulates_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", option]) == 2
    assert f"{option.split('=')[0]} expects a number from" in capsys.readouterr().err
