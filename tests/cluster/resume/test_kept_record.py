"""The record and the config of a run are put back from its states, or what is lost is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.resume.resumed_run import newest_run, open_run
from rlhfspec.cluster.resume.run_state import EvaluationMarks, last_state, read_state
from rlhfspec.cluster.resume.save_state import Boundary, StateKeeper
from rlhfspec.core.checkpoint_manifest import write_manifest
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import apply_overrides, config_from_dict, config_text
from rlhfspec.core.errors import ConfigError, ModelError

NUM_DONE = 4


class Trainers:
    """Of one that sees the folder and holds a byte."""

    def blind_to(self, folder: Path) -> list[str]:
        return []

    def save_state(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "shard").write_bytes(b"w")


def config(*settings: str) -> Config:
    tree = {"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}, "run": {"iterations": 6}}
    return config_from_dict(apply_overrides(tree, settings))


def row(number: int, key: str) -> str:
    return json.dumps({key: number, "loss": number / 3}) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Cut off in its sixth iteration, with a state after four that the keeper itself has written."""
    of = config("run.state_every=4", "algorithm.kl_coef=0.3", "tracking.samples=3")
    made = RunDir.create(of, tmp_path / "run-20260101-120000")
    files = {
        made.metrics_file: ("iteration", NUM_DONE),
        made.histograms_file: ("iteration", NUM_DONE),
        made.weights_file: ("weight_version", NUM_DONE + 1),
        made.evaluations_file: ("num_iterations", NUM_DONE + 1),
    }
    for file, (key, count) in files.items():
        file.write_text("".join(row(number, key) for number in range(count)))
    made.moves_file.write_text(row(0, "iteration") * 3 + row(2, "iteration"))
    weights = SimpleNamespace(manifest=SimpleNamespace(weight_version=NUM_DONE, checksum="c"))
    system: Any = SimpleNamespace(config=of, draft=None, target=weights, trainers=Trainers())
    boundary = Boundary(num_iterations=NUM_DONE, cursor={"epoch": 0}, evaluations=EvaluationMarks())
    assert StateKeeper(system, made, pytest.fail).save(boundary) is not None
    for file, (key, count) in files.items():
        with file.open("a") as out:
            out.write(row(count, key) + '{"cut')
    made.set_status("interrupted", "killed")
    return made


def texts(run_dir: RunDir) -> dict[str, str]:
    return {path.name: path.read_text() for path in run_dir.path.glob("*.jsonl")}


def resume(run_dir: RunDir) -> list[str]:
    """What is noted when the run is gone on with."""
    notes: list[str] = []
    resumed = open_run(run_dir.path, (), lambda line: None)
    resumed.begin(config_text(resumed.config), notes.append)
    return notes


def expected(run_dir: RunDir) -> dict[str, str]:
    whole = {
        name: "".join(row(number, "iteration") for number in range(NUM_DONE))
        for name in ("metrics.jsonl", "histograms.jsonl")
    }
    for name, key in (("weights.jsonl", "weight_version"), ("evaluations.jsonl", "num_iterations")):
        whole[name] = "".join(row(number, key) for number in range(NUM_DONE + 1))
    return whole | {"moves.jsonl": row(0, "iteration") * 3 + row(2, "iteration")}


def test_a_whole_record_is_taken_back_to_the_state_without_a_word(run_dir: RunDir) -> None:
    assert resume(run_dir) == []
    assert texts(run_dir) == expected(run_dir)


def without_line(number: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:number] + lines[number + 1 :]))

    return damage


def first_bytes_changed(file: Path) -> None:
    file.write_bytes(b"\xff\x00{" + file.read_bytes()[3:])


def other_figure(file: Path) -> None:
    file.write_text(file.read_text().replace("0.6666666666666666", "0.7777777777777777"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "weights.jsonl", "histograms.jsonl", "moves.jsonl"])
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        without_line(0),
        without_line(1),
        first_bytes_changed,
        other_figure,
        lambda f: f.write_bytes(b""),
    ],
    ids=["gone", "first line", "second line", "garbage", "another figure", "empty"],
)
def test_a_damaged_record_is_put_back_from_the_state_and_named(
    run_dir: RunDir, name: str, damage: Callable[[Path], None]
) -> None:
    damage(run_dir.path / name)
    (note,) = resume(run_dir)
    assert note.startswith(f"{run_dir.path / name} ") and note.endswith("put back from state_0004")
    assert texts(run_dir) == expected(run_dir)


def of_earlier_version(run_dir: RunDir) -> None:
    """Make the state one that keeps neither record nor config."""
    folder = run_dir.checkpoint_dir("state", NUM_DONE)
    shutil.rmtree(folder / "record")
    (folder / "config.yaml").unlink()
    (folder / "rlhfspec-manifest.json").unlink()
    write_manifest(folder, model="state", weight_version=NUM_DONE, parameter_checksum="c")


@pytest.mark.parametrize(
    ("name", "key", "of"), [("metrics", "iteration", 4), ("weights", "weight_version", 5)]
)
def test_what_no_state_keeps_is_named(run_dir: RunDir, name: str, key: str, of: int) -> None:
    of_earlier_version(run_dir)
    file = run_dir.path / f"{name}.jsonl"
    without_line(1)(file)
    (note,) = resume(run_dir)
    assert note.startswith(f"{file} lacks 1 of {of} lines ({key} 1) that no state keeps")
    assert len(file.read_text().splitlines()) == of - 1


def test_a_config_that_was_cut_is_refused_with_the_command_that_puts_it_back(run_dir: RunDir) -> None:
    file = run_dir.config_file
    whole = file.read_text()
    kept = run_dir.checkpoint_dir("state", NUM_DONE) / "config.yaml"
    assert kept.read_text() == whole
    lines = whole.splitlines(keepends=True)
    silent = []
    ends_of_sections = {number for number, line in enumerate(lines) if not line.startswith(" ")} - {0}
    for number in {*range(1, len(lines), 7), *ends_of_sections}:
        file.write_text("".join(lines[:number]))
        with pytest.raises(ConfigError) as refused:
            open_run(run_dir.path, (), lambda line: None)
        if f"cp {kept} {file}" not in str(refused.value):
            silent.append(number)
    assert silent == []
    file.write_text(whole[: whole.index("algorithm:")])
    with pytest.raises(ConfigError, match=r"algorithm\.kl_coef was 0\.3, now .*"):
        open_run(run_dir.path, (), print)
    shutil.copy(kept, file)
    assert open_run(run_dir.path, (), print).config.algorithm.kl_coef == 0.3


def test_auto_goes_by_the_config_that_the_state_keeps(run_dir: RunDir) -> None:
    file, base, notes = run_dir.config_file, run_dir.path.parent, []
    whole = file.read_text()
    file.write_text(whole[: whole.index("algorithm:")])
    # its file says so, its state does not
    assert newest_run(config("tracking.samples=3"), base, notes.append) is None
    assert "algorithm.kl_coef was 0.3, now " in notes[0]
    resumed = newest_run(config("algorithm.kl_coef=0.3"), base, print)
    assert resumed is not None
    resumed.begin(config_text(resumed.config), pytest.fail)
    assert "kl_coef: 0.3" in file.read_text()


def test_a_config_cut_within_its_last_value_is_refused(run_dir: RunDir) -> None:
    file = run_dir.config_file
    file.write_text(file.read_text().rstrip("\n"))
    with pytest.raises(ConfigError, match="it ends within a line; put it back"):
        open_run(run_dir.path, (), print)


def test_changes_by_set_are_no_damage(run_dir: RunDir) -> None:
    resumed = open_run(run_dir.path, ["run.keep_states=3", "tracking.samples=0"], print)
    resumed.begin(config_text(resumed.config), pytest.fail).set_status(
        "interrupted", "killed again, before another state"
    )
    assert open_run(run_dir.path, (), print).config.run.keep_states == 3


def test_a_state_of_an_earlier_version_is_gone_on_from_without_a_word(run_dir: RunDir) -> None:
    of_earlier_version(run_dir)
    assert resume(run_dir) == [] and texts(run_dir) == expected(run_dir)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 3}, "expected schema version 2 at most, got 3"),
        ({"wind": 3, "rain": 1}, "this version does not know its keys rain, wind"),
        ({"cursor": None}, "it lacks cursor"),
        ({"evaluations": {"num_done": 1, "worst": 0.5}}, "this version does not know its keys worst"),
        ({"evaluations": [1]}, "expected an object of JSON, got list"),
    ],
    ids=["version", "keys", "missing", "mark", "list"],
)
def test_a_state_of_another_version_is_one_clear_line(
    run_dir: RunDir, change: dict[str, Any], said: str
) -> None:
    folder = run_dir.checkpoint_dir("state", NUM_DONE)
    tree = json.loads((folder / "state.json").read_text()) | change
    (folder / "state.json").write_text(
        json.dumps({k: v for k, v in tree.items() if v is not None or k[0] == "d"})
    )
    (folder / "rlhfspec-manifest.json").unlink()
    write_manifest(folder, model="state", weight_version=NUM_DONE, parameter_checksum="c")
    with pytest.raises(ModelError) as refused:
        read_state(folder)
    assert said in str(refused.value) and "another version of this project" in str(refused.value)
    assert "Error:" not in str(refused.value)
    notes: list[str] = []
    assert last_state(run_dir, notes.append) is None and len(notes) == 1
