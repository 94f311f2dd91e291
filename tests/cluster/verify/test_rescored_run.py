"""`rlhfspec rescore`: another reward over recorded samples, beside the one that they had."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from made_run import SAMPLES, change_row, make_run, run_config

from rlhfspec.cluster.cli import main
from tests.conftest import TinyPair

OLD = [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 3.0, 2.0, 1.0, 1.0, 0.0, 0.5]
NEW = [4.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 1.0, 0.0, 0.5]
"By sample index, in groups of three: one begins to teach, one ceases to, one is turned round, one stays."


@pytest.fixture(scope="module")
def run(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rescored")
    made = make_run(run_config(tiny_pair, folder), folder / "run")
    for index, old in enumerate(OLD):
        change = {"group_id": index // 3, "reward": old}
        change_row(made, index // SAMPLES, index % SAMPLES, lambda row, change=change: row.update(change))
    (folder / "mended.py").write_text(
        f"NEW = {NEW}\n\n\ndef mended(response, sample_index):\n    return NEW[sample_index]\n\n\n"
        "def odd(response, sample_index):\n    return NEW[sample_index] if sample_index % 2 else 1 / 0\n"
    )
    return made


def mended(run: Path, name: str = "mended") -> list[str]:
    return ["rescore", str(run), "--reward", f"{run.parent / 'mended.py'}:{name}"]


def test_old_and_new_rewards_stand_side_by_side(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main([*mended(run), "--out", str(tmp_path / "all.jsonl")]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "samples 12 of iterations 1 to 2" in said
    assert "mean 0.7917 old, 1.208 new" in said and "changed 4 samples, 33.3%" in said
    assert f"correlation {statistics.correlation(OLD, NEW):.3f}" in said
    # (0, 1) and (0, 2) part, two pairs of the second group are tied, all of the third are swapped
    assert "order in groups another in 3 of 4 groups: of 12 pairs 3 are swapped, 4 tied or parted" in said
    assert "groups that teach 3 old, 3 new: 1 begin, 1 cease" in said
    assert [line.split()[1] for line in said if line.startswith("sample ")] == ["0:", "6:", "8:", "4:"]
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["old"] for row in rows] == OLD and [row["new"] for row in rows] == NEW
    assert [row["sample_index"] for row in rows] == [*range(12)]
    gap = sum(abs(row["old_advantage"] - row["new_advantage"]) for row in rows) / 12
    assert f"advantages change by {gap:.3g} on average (GRPO's)" in said
    assert rows[0]["new_advantage"] == pytest.approx((4 - 4 / 3) / (16 / 3) ** 0.5, rel=1e-5)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_one_iteration_is_scored_and_its_rows_are_a_table(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*mended(run), "--iterations", "2", "--out", str(tmp_path / "second.parquet")]) == 0
    assert "6 of iterations 2 to 2" in capsys.readouterr().out
    assert pq.read_table(tmp_path / "second.parquet")["new"].to_pylist() == NEW[SAMPLES:]
    assert main([*mended(run, "odd"), "--iterations", "1-2"]) == 0
    out = capsys.readouterr().out
    assert "without a new reward  6; the first: reward function" in out and "6 of iterations 1 to 2" in out


def test_a_key_of_the_reward_is_changed_and_the_rest_of_it_stays(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chain reward of a random model is 0 throughout."""
    assert main(["rescore", str(run), "--set", "reward.mean=-2"]) == 0
    assert "0.7917 old, 2 new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "expected another reward, got none"),
        (["--reward", "nothing.py:at_all"], "nothing.py"),
        (["--reward", "gsm8k"], "none of the 12 samples of"),
        (["--set", "reward.kind=serve", "--set", "reward.url=http://a/b"], "a reward server gave them"),
        (["--set", "reward.mean=1", "--iterations", "7-9"], "keeps no rollouts of iterations 7 to 9"),
        (["--set", "reward.mean=1", "--iterations", "x"], "--iterations expects a whole number above 0, got x"),
        (["--set", "reward.mean=1", "--out", "table.csv"], "expected a file .parquet or .jsonl"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(
    run: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rescore", str(run), *more]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(tmp_path), "--set", "reward.mean=1"]) == 2
    assert "is no run folder" in capsys.readouterr().err
