"""`rlhfspec data check`: report, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlhfspec.cluster.cli import main
from tests.conftest import TinyPair


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    path.write_text("".join(json.dumps({"question": f"0{n}:a+1=", "answer": "b"}) + "\n" for n in range(9)))
    return path


def test_a_good_file_is_shown(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(good)]) == 0
    out = capsys.readouterr().out
    for part in ("9 rows, 9 prompts", "characters  min 7, median 7, max 7", "good.jsonl:3", "00:a+1="):
        assert part in out


def test_the_tokenizer_counts_tokens(
    good: Path, tiny_pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["data", "check", str(good), "--tokenizer", str(tiny_pair.target)]
    assert main([*argv, "--set", "data.limit=2"]) == 0
    out = capsys.readouterr().out
    assert "2 rows, 2 prompts\ntokens      min 7, median 7, max 7" in out
    assert out.count("7 tokens, as the model sees it") == 2


def test_faults_are_shown_and_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "a", "answer": "b"}\n{"question": 3\n' + '{"answer": "b"}\n' * 20)
    assert main(["data", "check", str(bad)]) == 2
    said = capsys.readouterr()
    assert "faults: 21 of 2 kinds, the first of each" in said.out
    assert "1 x " in said.out and "bad.jsonl:2 is not valid JSON" in said.out
    assert "20 x " in said.out and "bad.jsonl:3 has no field 'question'" in said.out
    assert said.err.splitlines()[-1].startswith("error: ") and "21 faults; the first:" in said.err


def test_the_data_of_a_config(
    good: Path, tmp_path: Path, tiny_pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    tree = {
        "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
        "data": {"sources": [{"path": str(good)}, {"task": "chain", "limit": 5}], "deduplicate": "exact"},
    }
    config.write_text(yaml.safe_dump(tree))
    assert main(["data", "check", "--config", str(config)]) == 0
    assert f"{good} + chain: 14 rows" in capsys.readouterr().out
    assert main(["data", "check", str(good), "--config", str(config)]) == 0
    assert f"{good}: 9 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name what to check"),
        (["{good}", "--set", "data.promt_field=x"], "did you mean 'prompt_field'"),
        (["{good}", "--set", "data.filter=no_such:f"], "cannot import no_such"),
        (["{good}", "--tokenizer", "{good}.none"], "does not exist"),
        (["{good}.jsonl"], "does not exist; check data.path"),
    ],
)
def test_what_cannot_be_checked_is_one_error(
    argv: list[str], message: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", *(word.replace("{good}", str(good)) for word in argv)]) == 2
    assert message in capsys.readouterr().err
