"""`rlhfspec pairs`: the best and the worst of each group as rows of text that `rlhfspec dpo` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_run import SAMPLES, change_row, make_run, run_config

from rlhfspec.cluster.cli import main
from rlhfspec.core.settings.supervised import FeedbackConfig
from rlhfspec.engine.weights.loading import load_tokenizer
from rlhfspec.learning.data.feedback import encode_feedback
from rlhfspec.learning.data.supervised_rows import read_raw_rows
from tests.conftest import TinyPair

REWARDS = [0.0, 1.0, 1.0, 0.5, 0.5, 0.5, 2.0, 1.0, 0.0, 1.0, 3.0, 2.0]
"By sample index, in groups of three: the second has no difference."


@pytest.fixture(scope="module")
def run(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four groups; sample 10, the best of the last, has no end."""
    folder = tmp_path_factory.mktemp("pairs")
    made = make_run(run_config(tiny_pair, folder), folder / "run")
    for index, reward in enumerate(REWARDS):
        change = {"group_id": index // 3, "reward": reward}
        change |= {"response_token_ids": [8 + index, 9], "finish_reason": "length" if index == 10 else "stop"}
        change |= {name: [-1.0, -1.0] for name in ("policy_logprobs", "sampling_logprobs")}
        change |= {"draft_depths": None}
        change_row(made, index // SAMPLES, index % SAMPLES, lambda row, change=change: row.update(change))
    (folder / "other.py").write_text("def other(response, sample_index):\n    return -sample_index\n")
    return made


def rows_of(run: Path, out: Path, *more: str) -> list[dict[str, str]]:
    assert main(["pairs", str(run), "--out", str(out), *more]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_best_and_the_worst_of_each_group_are_a_pair(
    run: Path, tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(run, tmp_path / "pairs.jsonl")
    tokenizer = load_tokenizer(str(tiny_pair.target))
    texts = [tokenizer.decode([8 + index, 9]) for index in range(12)]
    ranked = [(texts[best], texts[worst]) for best, worst in ((1, 0), (6, 8), (11, 9))]
    assert [(row["chosen"], row["rejected"]) for row in rows] == ranked
    said = capsys.readouterr().out
    assert "3 pairs" in said and "left out: 1 groups without a difference" in said
    assert "left out: 1 samples that have no end" in said
    again = rows_of(run, tmp_path / "again.jsonl")
    assert again == rows
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "pairs.jsonl").read_bytes()
    data = FeedbackConfig(path=str(tmp_path / "pairs.jsonl"), eval_share=0.0)
    items, _ = encode_feedback(read_raw_rows(data, seed=0)[0], data, tokenizer, takes_unpaired=False)
    assert len(items) == 3


def test_another_reward_ranks_otherwise(run: Path, tiny_pair: TinyPair, tmp_path: Path) -> None:
    rows = rows_of(run, tmp_path / "pairs.jsonl", "--reward", f"{run.parent / 'other.py'}:other")
    tokenizer = load_tokenizer(str(tiny_pair.target))
    ranked = [(8, 10), (11, 13), (14, 16), (17, 19)]
    assert [(row["chosen"], row["rejected"]) for row in rows] == [
        tuple(tokenizer.decode([first, 9]) for first in pair) for pair in ranked
    ]


def test_a_group_without_a_pair_left_is_refused_and_another_file_is_too(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pairs", str(run), "--out", str(tmp_path / "pairs.txt")]) == 2
    assert "expected a file .jsonl" in capsys.readouterr().err
    assert main(["pairs", str(run), "--out", str(tmp_path / "p.jsonl"), "--iterations", "7"]) == 2
    assert "keeps no rollouts of iterations 7 to 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("--version", "1"), ("--limit", "3"), ("--sample", "1"), ("--sample", "4", "--iterations", "1")]
)
def test_flags_without_effect_are_refused(
    words: tuple[str, ...], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pairs", str(run), "--out", str(tmp_path / "p.jsonl"), *words]) == 2
    assert "--sample N takes 2 samples of a prompt or more and no --iterations" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.slow
def test_prompts_are_sampled_anew_from_a_kept_version_and_again_alike(
    local_ray: None, tiny_pair: TinyPair, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = f"{run.parent / 'by_length.py'}:by_length"
    (run.parent / "by_length.py").write_text("def by_length(response):\n    return len(response)\n")
    words = ("--sample", "4", "--limit", "8", "--reward", reward, "--set", "cluster.dashboard=false")
    words += ("--set", "sampling.max_new_tokens=100", "--set", "cluster.generation.num_actors=1")
    rows = rows_of(run, tmp_path / "last.jsonl", *words)
    assert f"weight version 2 of {run}" in capsys.readouterr().out
    assert rows and all(len(row["chosen"]) > len(row["rejected"]) for row in rows)
    assert rows_of(run, tmp_path / "again.jsonl", *words, "--version", "2") == rows
    assert rows_of(run, tmp_path / "first.jsonl", *words, "--version", "0") != rows
    assert main(["pairs", str(run), "--out", str(tmp_path / "p.jsonl"), *words, "--version", "7"]) == 2
    assert "keeps no whole weights of version 7: expected --version 0, 1, 2" in capsys.readouterr().err
