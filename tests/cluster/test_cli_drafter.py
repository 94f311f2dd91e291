"""`rlhfspec drafter`: makes a head that loads, evaluates it, and refuses bad input with one error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refused_command import refused

from rlhfspec.cluster.cli import main
from rlhfspec.engine.drafters.head.head_weights import load_head, read_origin
from rlhfspec.engine.weights.weight_files import weights_digest
from tests.conftest import TinyPair


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"question": f"0{1 + i % 8}:a+{i % 5}=", "kind": "ab"[i % 2]} for i in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_head_is_made_and_evaluated(
    tmp_path: Path, tiny_pair: TinyPair, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--target", str(tiny_pair.target), "--data", str(data), "--max-new-tokens", "12"]
    out = tmp_path / "head"
    more = ["--out", str(out), "--tokens", "100", "--draft-vocab", "16"]
    assert main(["drafter", "make", *common, *more]) == 0
    said = capsys.readouterr().out
    assert "own responses" in said and "mean acceptance length" in said
    assert "positions are too few to judge a head by" in said
    for part in (
        "prompts: ",
        "has 'kind', which nothing here reads (used are question); ",
        f"next: rlhfspec drafter eval --target {tiny_pair.target}",
        "draft: " + str(out),
    ):
        assert part in said
    origin = read_origin(out)
    assert origin is not None and origin.target_weights == weights_digest(str(tiny_pair.target))
    assert origin.target_weights != weights_digest(str(tiny_pair.draft))
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644
    head = load_head(out, num_target_layers=2)
    assert head.config.draft_vocab_size == 16
    assert (
        main(["drafter", "eval", *common, "--drafter", str(out), "--category-field", "kind", "--limit", "6"])
        == 0
    )
    said = capsys.readouterr().out
    for part in ("temperature 1", "temperature 0.6", "by position", "by kind", "level 1", "this target"):
        assert part in said


def test_a_head_that_drafts_nothing_of_use_is_called_so(
    tmp_path: Path, tiny_pair: TinyPair, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--target", str(tiny_pair.target), "--data", str(data), "--max-new-tokens", "12"]
    more = ["--out", str(tmp_path / "head"), "--tokens", "100", "--draft-vocab", "1"]
    assert main(["drafter", "make", *common, *more]) == 0
    assert "this head is worth nothing to a run" in capsys.readouterr().out


def test_bad_input_is_refused_before_the_work(
    tmp_path: Path, tiny_pair: TinyPair, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("")
    common = ["--target", tiny_pair.target, "--data", data, "--max-new-tokens", 12]
    new = ["--out", tmp_path / "new"]
    cases = {
        "is not empty": ["make", *common, "--out", full],
        "--budget expects seconds above 0": ["make", *common, *new, "--budget", "0"],
        "--temperature expects": ["make", *common, *new, "--temperature", "-1"],
        "--tokens expects a whole number above 0": ["make", *common, *new, "--tokens", "0"],
        "--seed expects a number from 0 to 2**63 - 1, got -1": ["make", *common, *new, "--seed", "-1"],
        "--seed expects a number from 0 to 2**63 - 1, got x": ["eval", *common, "--seed", "x"],
        "does not exist": ["eval", *common, "--drafter", tmp_path / "none"],
        "cannot be read": ["eval", *common, "--drafter", full],
        "nosuch": ["make", "--target", tmp_path / "nosuch", "--data", data, *new],
        "leaves room for": ["make", *common, *new, "--max-new-tokens", "1000"],
        "missing.jsonl": ["make", "--target", tiny_pair.target, "--data", tmp_path / "missing.jsonl", *new],
    }
    for said, argv in cases.items():
        assert said in refused(capsys, "drafter", *argv)
    assert not (tmp_path / "new").exists()
