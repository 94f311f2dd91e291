"""What a cut-off run is gone on with: whole states only, by its own config, and nothing of later iterations."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.owner import ProcessIdentity
from rlhfspec.cluster.resume import resumed_run
from rlhfspec.cluster.resume.changed_keys import deciding_changes
from rlhfspec.cluster.resume.resumed_run import newest_run, open_run, take_over
from rlhfspec.cluster.resume.rewind import rewind
from rlhfspec.cluster.resume.run_state import EvaluationMarks, RunState, last_state
from rlhfspec.cluster.resume.save_state import Boundary, StateKeeper, state_tree
from rlhfspec.core.checkpoint_manifest import write_manifest
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import apply_overrides, config_from_dict, config_text
from rlhfspec.core.errors import ConfigError, RunTaken
from rlhfspec.core.records import SampleKey
from rlhfspec.core.settings.supervised import DpoConfig, SftConfig
from rlhfspec.policies.staleness.rollout_schedule import InFlight

STAMP = "20260101-120000"


def config(*settings: str) -> Config:
    tree = {"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}, "run": {"iterations": 6}}
    return config_from_dict(apply_overrides(tree, settings))


def put_state(
    run_dir: RunDir, num_iterations: int, *, unscored: Mapping[SampleKey, Any] | None = None
) -> Path:
    folder = run_dir.checkpoint_dir("state", num_iterations)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "shard").write_bytes(b"weights")
    marks = EvaluationMarks(num_done=1, best=0.5, metric="eval/reward_mean")
    state = RunState(
        folder=folder,
        num_iterations=num_iterations,
        weight_version=num_iterations,
        parameter_checksum="c",
        draft_version=1,
        draft_checksum="d",
        cursor={"epoch": 0, "position": 8 * num_iterations},
        evaluations=marks,
    )
    tree = state_tree(state, InFlight(unscored=unscored or {}))
    (folder / "state.json").write_text(json.dumps(tree))
    write_manifest(folder, model="state", weight_version=num_iterations, parameter_checksum="c")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """After six iterations, with states after 2 and 4, cut off."""
    made = RunDir.create(config(), tmp_path / f"run-{STAMP}")
    for path, key, count in (
        (made.metrics_file, "iteration", 6),
        (made.histograms_file, "iteration", 6),
        (made.evaluations_file, "num_iterations", 7),
        (made.weights_file, "weight_version", 7),
    ):
        path.write_text("".join(json.dumps({key: number}) + "\n" for number in range(count)) + '{"cut')
    for number in range(6):
        made.rollouts_file(number).touch()
        made.samples_file(number).parent.mkdir(exist_ok=True)
        made.samples_file(number).touch()
        made.trace_file(number).parent.mkdir(exist_ok=True)
        made.trace_file(number).touch()
        made.checkpoint_dir("target", number).mkdir()
    made.evaluated_file(4).parent.mkdir()
    for number in (0, 2, 4, 6):
        made.evaluated_file(number).touch()
    for number in (2, 4):
        put_state(made, number)
    made.set_status("interrupted", "killed")
    return made


def column(path: Path, key: str) -> list[int]:
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


def numbers(folder: Path) -> list[int]:
    return sorted(int("".join(filter(str.isdigit, path.stem))) for path in folder.iterdir())


def test_a_run_folder_is_taken_back_to_its_state(run_dir: RunDir) -> None:
    state = last_state(run_dir, pytest.fail)
    assert state is not None and state.evaluations.best == 0.5
    rewind(run_dir, state, pytest.fail)
    assert (
        column(run_dir.metrics_file, "iteration")
        == column(run_dir.histograms_file, "iteration")
        == [0, 1, 2, 3]
    )
    assert column(run_dir.evaluations_file, "num_iterations") == [0, 1, 2, 3, 4]
    assert column(run_dir.weights_file, "weight_version") == [0, 1, 2, 3, 4]
    for folder in ("rollouts", "samples", "traces"):
        assert numbers(run_dir.path / folder) == [0, 1, 2, 3]
    assert numbers(run_dir.path / "evaluations") == [0, 2, 4]
    kept = sorted(path.name for path in (run_dir.path / "checkpoints").iterdir())
    assert kept == ["state_0002", "state_0004", *(f"target_{number:04d}" for number in range(4))]


def test_without_a_state_nothing_of_the_iterations_is_kept(run_dir: RunDir) -> None:
    rewind(run_dir, None, pytest.fail)
    left = {path.name for path in run_dir.path.rglob("*") if path.is_file()}
    assert left == {"config.yaml", "status.json", "0001.json"} and not list(
        (run_dir.path / "checkpoints").iterdir()
    )


@pytest.mark.parametrize("file", ["trainer/shard", "state.json", "rlhfspec-manifest.json"])
def test_a_damaged_state_is_named_and_the_one_before_it_is_used(run_dir: RunDir, file: str) -> None:
    damaged = run_dir.checkpoint_dir("state", 4) / file
    damaged.write_bytes(damaged.read_bytes()[:-3])
    notes: list[str] = []
    resumed = open_run(run_dir.path, (), notes.append)
    assert resumed.state.num_iterations == 2
    assert "state_0004 is passed over" in notes[0] and Path(file).name in notes[0]


def test_a_run_whose_states_are_all_damaged_is_refused(run_dir: RunDir) -> None:
    for number in (2, 4):
        (run_dir.checkpoint_dir("state", number) / "trainer" / "shard").unlink()
    with pytest.raises(ConfigError, match=r"expected a whole state in checkpoints/, got none"):
        open_run(run_dir.path, (), lambda line: None)


def test_a_finished_run_is_refused_until_more_iterations_are_asked_for(run_dir: RunDir) -> None:
    run_dir.set_status("finished")
    with pytest.raises(ConfigError, match=r"is finished, after 6 iterations.*run\.iterations"):
        open_run(run_dir.path, (), print)
    resumed = open_run(run_dir.path, ["run.iterations=9"], print)
    assert (resumed.state.num_iterations, resumed.config.run.iterations) == (4, 9)


@pytest.mark.parametrize("state", ["running", "stopping"])
def test_a_living_run_is_refused_and_a_killed_one_is_not(run_dir: RunDir, state: str) -> None:
    run_dir.set_status(state)
    with pytest.raises(ConfigError, match=rf"is not cut off: state {state}: process \d+"):
        open_run(run_dir.path, (), print)
    # its process as it was, gone by now
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    status = json.loads(run_dir.status_file.read_text())
    run_dir.status_file.write_text(json.dumps(status | {"pid": int(child.stdout)}))
    resumed = open_run(run_dir.path, (), print)
    assert resumed.begin(config_text(resumed.config), pytest.fail).status().get("pid") == os.getpid()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "is not a run folder"), ("model: {name: x}\n", "is no run of `rlhfspec train`")],
    ids=["no config", "another command's"],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        open_run(tmp_path, (), print)


def test_a_part_of_a_run_is_refused_with_the_run_s_own_folder(run_dir: RunDir) -> None:
    state = run_dir.path / "checkpoints" / "state_0001"
    state.mkdir(parents=True, exist_ok=True)
    shutil.copy(run_dir.config_file, state)
    for part in (state, state.parent):
        with pytest.raises(ConfigError, match=f"is a part of a run; .* give {run_dir.path}$"):
            open_run(part, (), print)


def test_a_run_that_another_process_has_taken_writes_nothing_more(run_dir: RunDir) -> None:
    run_dir.set_status("running")
    other = RunDir.open(run_dir.path)
    assert other.owner.claim(after=other.owner.last())
    other.set_status("running", "the other")
    run_dir.progress(5, "update")
    run_dir.set_status("failed")
    assert other.status()["reason"] == "the other"
    with pytest.raises(RunTaken, match=rf"taken up by process {os.getpid()} on .*; this one ends here"):
        run_dir.owner.require()
    other.owner.require()


def test_of_two_processes_that_resume_a_run_one_is_refused(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = (open_run(run_dir.path, (), print).run_dir for _ in range(2))
    # both have found it cut off before either begins
    last = theirs.owner.last()
    take_over(mine)
    monkeypatch.setattr(theirs.owner, "last", lambda: last)
    monkeypatch.setattr(resumed_run, "may_be_running", lambda status: False)
    with pytest.raises(ConfigError, match="was just taken up by another process"):
        take_over(theirs)
    mine.owner.require()


def test_what_only_looks_like_a_state_is_left_alone(run_dir: RunDir) -> None:
    checkpoints = run_dir.path / "checkpoints"
    (checkpoints / "state_9999").symlink_to("state_0002")
    (checkpoints / "state_9998").write_text("no folder")
    shutil.copytree(checkpoints / "state_0002", checkpoints / "state_0007")
    (run_dir.path / "owners" / "²0.json").touch()
    notes: list[str] = []
    state = last_state(run_dir, notes.append)
    assert state is not None and state.num_iterations == 4
    assert len(notes) == 1 and "state_0007 is passed over: " in notes[0] and "of 2 iterations" in notes[0]
    assert run_dir.owner.last() == 1


def test_only_states_whose_samples_earlier_versions_pass_over_are_refused_by_them(run_dir: RunDir) -> None:
    waiting: Any = object()
    put_state(run_dir, 6, unscored={SampleKey(run_seed=0, sample_index=1): waiting})
    trees = [
        json.loads((run_dir.checkpoint_dir("state", number) / "state.json").read_text()) for number in (4, 6)
    ]
    # an earlier version reads 1 and nothing else
    assert [tree["schema_version"] for tree in trees] == [1, 2]
    state = last_state(run_dir, pytest.fail)
    assert state is not None and state.num_iterations == 6


def test_a_state_that_stands_is_not_written_again(run_dir: RunDir) -> None:
    config_ = config("run.state_every=2")
    system: Any = SimpleNamespace(
        config=config_,
        draft=None,
        target=SimpleNamespace(manifest=SimpleNamespace(weight_version=4, checksum="c")),
    )
    keeper = StateKeeper(system, run_dir, pytest.fail)
    before = (run_dir.checkpoint_dir("state", 4) / "state.json").stat()
    kept = keeper.save(Boundary(num_iterations=4, cursor={}, evaluations=EvaluationMarks()))
    # no trainer was asked: there is none
    assert kept is not None and kept.num_iterations == 4
    assert (run_dir.checkpoint_dir("state", 4) / "state.json").stat() == before


@pytest.mark.parametrize(
    "setting",
    [
        "run.seed=1",
        "algorithm.kl_coef=0.5",
        "data.limit=3",
        "models.target=c",
        "trainer.lora={rank: 2}",
        "sampling.max_new_tokens=9",
        "cluster.trainer.num_actors=2",
    ],
)
def test_a_change_that_decides_about_the_result_is_refused_by_its_name(run_dir: RunDir, setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"changes its result: .*{key}[\w.]* was .*, now "):
        open_run(run_dir.path, [setting], print)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--resume", "RUN", "--config", "c.yaml"], "by its own config"),
        (["--resume", "auto"], "expected --config FILE, got none"),
        ([], "expected --config FILE, got none; or --resume RUN"),
    ],
    ids=["both", "auto without one", "neither"],
)
def test_a_run_has_one_config(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_run_may_get_longer_unless_its_learning_rate_falls_towards_the_end() -> None:
    harmless = config("run.iterations=9", "cluster.generation.num_actors=4", "tracking.tensorboard=true")
    assert deciding_changes(config(), harmless) == []
    falling, longer = (config("trainer.schedule=cosine", *more) for more in ((), ("run.iterations=9",)))
    assert deciding_changes(falling, longer) == ["run.iterations was 6, now 9"]


def test_how_a_draft_head_is_trained_decides_nothing() -> None:
    other = config("drafter_training.spot=off", "drafter_training.buffer_mb=64", "speculation.drafter=head")
    assert deciding_changes(config(), other) == []


def test_auto_goes_on_with_the_newest_run_of_the_same_config(run_dir: RunDir) -> None:
    base, notes = run_dir.path.parent, []
    other = RunDir.create(config("run.seed=1"), base / "run-20260102-120000")
    other.set_status("interrupted")
    found = newest_run(config(), base, notes.append)
    assert found is not None and found.run_dir.path == run_dir.path and found.state.num_iterations == 4
    assert "passes over" in notes[0] and "run.seed was 1, now 0" in notes[0]
    assert newest_run(config("run.name=else"), base, notes.append) is None


def test_auto_begins_a_new_run_behind_one_that_is_finished_or_has_no_state(run_dir: RunDir) -> None:
    base, notes = run_dir.path.parent, []
    later = RunDir.create(config(), base / f"run-{STAMP}-2")
    later.set_status("failed", "x")
    assert newest_run(config(), base, notes.append) is None and "has no state" in notes[-1]
    later.set_status("finished")
    assert newest_run(config(), base, notes.append) is None and "is finished" in notes[-1]


def test_auto_does_not_take_a_run_that_was_just_heard_of_on_another_machine(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.set_status("running")
    away = ProcessIdentity.of_this().as_tree() | {"host": "elsewhere"}
    status = json.loads(run_dir.status_file.read_text()) | away

    def beat(seconds: float) -> None:
        run_dir.status_file.write_text(json.dumps(status | {"heartbeat": "2999-01-01T00:00:00+00:00"}))

    run_dir.status_file.write_text(json.dumps(status))
    monkeypatch.setattr("rlhfspec.cluster.resume.resumed_run.time.sleep", beat)
    with pytest.raises(ConfigError, match="is not cut off"):
        newest_run(config(), run_dir.path.parent, print)


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "live.json", "weights.jsonl"])
def test_a_folder_in_the_place_of_a_run_s_file_is_one_error_before_anything_is_done(
    run_dir: RunDir, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir.path / name).unlink(missing_ok=True)
    (run_dir.path / name).mkdir()
    for words in (["show"], ["status"], ["train", "--resume"]):
        assert main([*words, str(run_dir.path)]) == 2
        assert f"{run_dir.path / name} is a folder: expected a file" in capsys.readouterr().err
    notes: list[str] = []
    assert newest_run(config(), run_dir.path.parent, notes.append) is None
    assert "passes over" in notes[0] and "expected a file" in notes[0]


def no_states(run_dir: RunDir) -> None:
    shutil.rmtree(run_dir.checkpoints_folder)


def change_by_hand(run_dir: RunDir) -> None:
    (run_dir.checkpoints_folder / "state_0004" / "config.yaml").write_text(config_text(config()))
    run_dir.config_file.write_text(config_text(config("trainer.learning_rate=0.5")))


def kill(run_dir: RunDir) -> None:
    run_dir.set_status("running")
    status = json.loads(run_dir.status_file.read_text())
    run_dir.status_file.write_text(json.dumps(status | {"pid_started": 1}))


@pytest.mark.parametrize("hinder", [lambda run_dir: None, no_states, change_by_hand])
@pytest.mark.parametrize(
    "end",
    [
        kill,
        lambda run_dir: run_dir.set_status("failed", "the Ray node under this process died"),
        lambda run_dir: run_dir.set_status("interrupted", "SystemExit: 3"),
        lambda run_dir: run_dir.status_file.unlink(missing_ok=True),
        lambda run_dir: run_dir.set_status("running"),
        lambda run_dir: run_dir.set_status("finished"),
    ],
    ids=["killed", "failed", "interrupted", "no status", "runs", "finished"],
)
def test_what_status_says_of_going_on_is_what_a_resume_does(
    run_dir: RunDir, end: Any, hinder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    end(run_dir)
    hinder(run_dir)
    assert main(["status", str(run_dir.path)]) == 0
    said = capsys.readouterr().out
    refused = ""
    try:
        open_run(run_dir.path, [], lambda line: None)
    except ConfigError as error:
        refused = str(error)
    advises = f"go on with `rlhfspec train --resume {run_dir.path}`" in said
    assert advises == (not refused), said
    if hinder is change_by_hand and "not cut off" not in refused:
        assert "trainer.learning_rate was 1e-05, now 0.5" in refused
        assert ("it cannot be gone on with as it is: " + refused in said) == ("state finished" not in said)
    if hinder is no_states and "not cut off" not in refused and "state finished" not in said:
        assert "no state to go on from is kept yet (run.state_every): start it anew" in said


@pytest.mark.parametrize(("command", "kind"), [("sft", SftConfig), ("dpo", DpoConfig)])
def test_of_supervised_training_the_command_is_named(
    tmp_path: Path, command: str, kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"model": {"name": "a"}, "data": {"path": "rows.jsonl"}}
    made = RunDir.create(kind.model_validate(tree), tmp_path / "run")
    kill(made)
    assert main(["status", str(made.path)]) == 0
    assert "kept yet (trainer.checkpoint_every): start it anew" in capsys.readouterr().out
    made.checkpoint_dir("state", 100).mkdir()
    assert main(["show", str(made.path)]) == 0
    assert f"go on with `rlhfspec {command} --resume {made.path}`" in capsys.readouterr().out
