"""Data, checkpoints and run folders may be damaged in any way: they are read, or refused in one line.

A few hundred examples in CI; as `test_mutated_inputs.py`, more by RLHFSPEC_MUTATIONS.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import changed_bytes, examples
from small_learner_state import small_learner_state
from word_chat import word_chat

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.core.checkpoint_manifest import MANIFEST, verify_checkpoint, write_manifest
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import InputError, RlhfSpecError
from rlhfspec.core.settings.supervised import DemonstrationsConfig, PreferencesConfig
from rlhfspec.learning.data.preferences import encode_preferences
from rlhfspec.learning.data.supervised_rows import encode_demonstrations, read_raw_rows

TALKS = (
    b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]}\n'
    b'{"prompt": "who are you", "completion": "me"}\n'
    b'{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hi"}]}\n'
)
PAIRS = (
    b'{"prompt": "hi", "chosen": "you", "rejected": "me", "margin": 0.5}\n'
    b'{"chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good"}],'
    b' "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "bad"}]}\n'
)


def one_line(error: RlhfSpecError) -> None:
    assert str(error).strip() and len(str(error).splitlines()) == 1


def files_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated_runs")


@examples(0.1)
@given(raw=changed_bytes(TALKS))
def test_any_bytes_of_demonstrations_are_learned_from_or_refused(raw: bytes, folder: Path) -> None:
    (folder / "talks.jsonl").write_bytes(raw)
    data = DemonstrationsConfig(path=str(folder / "talks.jsonl"), eval_share=0.0)
    try:
        examples, _ = encode_demonstrations(read_raw_rows(data, seed=0)[0], data, word_chat())
    except InputError as error:
        one_line(error)
        return
    assert examples and all(example.num_learned > 0 for example in examples)


@examples(0.1)
@given(raw=changed_bytes(PAIRS))
def test_any_bytes_of_pairs_are_learned_from_or_refused(raw: bytes, folder: Path) -> None:
    (folder / "pairs.jsonl").write_bytes(raw)
    data = PreferencesConfig(path=str(folder / "pairs.jsonl"), eval_share=0.0)
    try:
        pairs, _ = encode_preferences(read_raw_rows(data, seed=0)[0], data, word_chat())
    except InputError as error:
        one_line(error)
        return
    assert pairs and all(pair.num_tokens > 1 for pair in pairs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "model.safetensors").write_bytes(bytes(range(200)))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    write_manifest(folder, model="m", weight_version=3, parameter_checksum="ab")
    return folder


@examples(0.1)
@given(data=st.data())
def test_a_checkpoint_that_passes_is_the_one_that_was_saved(data: st.DataObject, checkpoint: Path) -> None:
    name = data.draw(st.sampled_from(["model.safetensors", "config.json", MANIFEST]))
    good = (checkpoint / name).read_bytes()
    changed = data.draw(changed_bytes(good, fragments=name != "model.safetensors"))
    (checkpoint / name).write_bytes(changed)
    try:
        verify_checkpoint(checkpoint)
    except InputError as error:
        one_line(error)
    else:
        assert changed == good or name == MANIFEST
    finally:
        (checkpoint / name).write_bytes(good)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "state"
    small_learner_state().save(folder)
    return folder


@examples(0.1)
@given(data=st.data())
def test_any_bytes_of_a_trainer_s_state_are_taken_or_refused(data: st.DataObject, saved: Path) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in saved.iterdir())))
    good = (saved / name).read_bytes()
    (saved / name).write_bytes(data.draw(changed_bytes(good, fragments=False)))
    try:
        small_learner_state().load(saved)
    except RlhfSpecError as error:
        one_line(error)
    finally:
        (saved / name).write_bytes(good)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_from_dict({"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}})
    made = RunDir.create(config, tmp_path_factory.mktemp("runs") / "run")
    rows: list[dict[str, Any]] = [
        {"iteration": i, "reward/mean": 0.1 * i, "rollout/num_samples": 8, "time/iteration_s": 4.0}
        for i in range(5)
    ]
    made.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made.set_status("finished")
    (made.path / "weights.jsonl").write_text('{"weight_version": 0, "checksum": "ab"}\n')
    return made.path


@examples(0.02)
@given(data=st.data())
def test_a_damaged_run_folder_is_shown_or_refused(
    data: st.DataObject, run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(path for path in run_dir.iterdir() if path.is_file() and path.name != "weights.jsonl")
    file = data.draw(st.sampled_from(files))
    report = ["report", "--out", str(folder / "report.html")]
    command = data.draw(st.sampled_from([["show"], ["show", "--json"], report]))
    outcome(data, file, [*command, str(run_dir)], capsys)


@examples(0.02)
@given(data=st.data())
def test_a_damaged_run_folder_is_verified_or_refused(
    data: st.DataObject, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = data.draw(st.sampled_from(sorted(path for path in run_dir.iterdir() if path.is_file())))
    outcome(data, file, ["verify", str(run_dir)], capsys)


def outcome(data: st.DataObject, file: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    good, before = file.read_bytes(), files_below(file.parent)
    file.write_bytes(data.draw(changed_bytes(good)))
    try:
        code = main(command)
        err = capsys.readouterr().err
        assert code in (0, 1, 2)
        if code == 2:
            assert err.startswith("error: ") and err.count("\n") == 1
        assert files_below(file.parent) == before
    finally:
        file.write_bytes(good)
