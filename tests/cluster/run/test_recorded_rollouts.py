"""The record of an earlier run: what is taken over of it, what is a draft, what is neither; runs from a record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_run import SAMPLES, change_row, make_run, run_config

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.iteration_logs import read_weights_log
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.run.recorded_rollouts import RecordedRollouts
from rlhfspec.cluster.run.stream import Collected, RolloutStream
from rlhfspec.cluster.verify.choice import RecordedRun
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import SampleRequest, Stream
from rlhfspec.engine.weights.loading import load_tokenizer
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import load_prompts, sampling_params
from tests.cluster.resume.test_resumed_run import write_config
from tests.conftest import TinyPair


@pytest.fixture(scope="module")
def made(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    return make_run(run_config(tiny_pair, folder), folder / "run")


def requests_of(run: Path) -> list[SampleRequest]:
    """Of its two iterations, as a run of the same config asks for them."""
    config = RecordedRun.open(run).config
    tokenizer = load_tokenizer(config.models.target)
    dataset = load_prompts(config.data, tokenizer, seed=config.run.seed)
    cursor = PromptCursor(dataset, run_seed=config.run.seed, shuffle=True)
    return cursor.next_requests(
        2 * SAMPLES, 1, sampling_params(config.sampling, tokenizer, model=config.models.target)
    )


def split(
    run: Path, requests: Sequence[SampleRequest], *versions: int | None, **rounding: str
) -> tuple[list, list, list[str]]:
    """Both iterations by weights of these versions of the record, None: of no version of it; keys of `engine`."""
    notes: list[str] = []
    opened = RecordedRun.open(run)
    config, tokenizer = opened.config, load_tokenizer(opened.config.models.target)
    engine = config.engine.model_copy(update=rounding)
    record = RecordedRollouts(opened, config.models, engine, tokenizer, notes.append)
    checksums = read_weights_log(RunDir(path=run).weights_file)
    taken, live = [], []
    for iteration, version in enumerate(versions):
        weights: Any = SimpleNamespace(weight_version=iteration, checksum=checksums.get(version, "another"))
        of_iteration = requests[iteration * SAMPLES : (iteration + 1) * SAMPLES]
        for kept, found in zip((taken, live), record.split(of_iteration, weights), strict=True):
            kept.append(found)
    return taken, live, notes


def test_what_came_of_equal_weights_is_taken_over_and_the_rest_is_a_draft(made: Path) -> None:
    requests = requests_of(made)
    taken, live, notes = split(made, requests, 0, None)
    assert [one.key for one in taken[0]] == [one.key for one in requests[:SAMPLES]] and live[0] == []
    assert taken[1] == [] and [one.key for one in live[1]] == [one.key for one in requests[SAMPLES:]]
    whole, _, _ = split(made, requests, 0, 1)
    assert [one.draft.tolist() for one in live[1]] == [one.token_ids.tolist() for one in whole[1]]
    assert notes == [
        f"samples of {made} are taken over while weights are equal, from iteration 1 on",
        f"{SAMPLES} samples of {made} were taken over (iterations 1-1); iteration 2 and later ones are generated: "
        "weights are others: version 1 here is not its version 1",
    ]


def test_a_version_of_another_number_with_equal_weights_is_taken_over_as_this_run_counts_it(
    made: Path,
) -> None:
    requests = requests_of(made)
    (_, taken), _, _ = split(made, [*requests[SAMPLES:], *requests[:SAMPLES]], 1, 0)
    assert [one.key.sample_index for one in taken] == [*range(SAMPLES)]
    assert {span.weight_version for one in taken for span in one.weight_spans} == {1}


def test_what_is_not_the_same_sample_is_named_once_and_not_taken(made: Path) -> None:
    requests = requests_of(made)
    other = replace(requests[0].prompt, token_ids=requests[0].prompt.token_ids + 1)
    taken, live, notes = split(made, [replace(requests[0], prompt=other), *requests[1:]], 0, 1)
    assert [len(one) for one in taken] == [SAMPLES - 1, SAMPLES] and live[0][0].draft is None
    assert notes[1:] == [f"of {made} some samples are generated: prompts of its samples are others "
                         "(data, rollout.samples_per_prompt)"]  # fmt: skip
    warmer = [replace(one, sampling=replace(one.sampling, temperature=0.5)) for one in requests]
    taken, live, notes = split(made, warmer, 0, 1)
    assert taken == [[], []] and all(one.draft is not None for one in live[0])
    assert len(notes) == 1 and notes[0].endswith("its sampling.temperature is 1.0, here 0.5")
    held_out = [replace(one, key=replace(one.key, stream=Stream.EVAL)) for one in requests]
    assert split(made, held_out, 0) == ([[]], [held_out[:SAMPLES]], [])


def test_what_would_be_rounded_otherwise_and_what_was_changed_is_not_taken_over(
    made: Path, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    taken, live, notes = split(made, requests_of(made), 0, 1, forward="stock")
    assert taken == [[], []] and all(one.draft is not None for one in live[0])
    assert notes[0].endswith("its engine.forward is auto, here stock")
    run = make_run(run_config(tiny_pair, tmp_path), tmp_path / "run")
    change_row(run, 0, 1, lambda row: row.update(response="another text"))
    taken, live, notes = split(run, requests_of(run), 0)
    assert [len(taken[0]), len(live[0])] == [SAMPLES - 1, 1]
    assert "its tokens are not its texts" in notes[1]


def test_a_damaged_file_of_the_record_is_named_and_its_samples_are_generated(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    run = make_run(run_config(tiny_pair, tmp_path), tmp_path / "run")
    RunDir(path=run).rollouts_file(0).write_bytes(b"no parquet")
    taken, live, notes = split(run, requests_of(run), 0, 1)
    assert [len(one) for one in taken] == [0, SAMPLES] and len(live[0]) == SAMPLES
    assert "cannot be read as rollouts of a run" in notes[0] and "not in its rollouts" in notes[1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"environment": {"kind": "sample_environments:Parrot"}}, "environment.kind"),
        ({"rollout": {"max_staleness": 1}}, "rollout.max_staleness"),
        ({"algorithm": {"kind": "grpo", "dynamic_sampling": True}}, "algorithm.dynamic_sampling"),
    ],
)
def test_settings_that_a_record_does_not_go_with_are_refused(
    tiny_pair: TinyPair, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    tree = run_config(tiny_pair, tmp_path).model_dump(mode="json")
    tree["rollout"] |= {"record": "RUN", "samples_per_prompt": 2}
    for section, values in changes.items():
        tree[section] = (tree[section] if section == "rollout" else {}) | values
    with pytest.raises(ConfigError, match=f"goes with no {named}"):
        config_from_dict(tree)


def test_a_run_with_a_record_takes_drafts(tiny_pair: TinyPair, tmp_path: Path) -> None:
    assert not run_config(tiny_pair, tmp_path).takes_drafts
    assert run_config(tiny_pair, tmp_path, rollout={"record": "RUN"}).takes_drafts


def test_a_record_of_another_seed_and_what_is_no_run_are_refused(
    made: Path, tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path, tiny_pair, "iterations: 1")
    assert main(["train", "--config", str(file), "--rollouts", str(made), "--dry-run"]) == 2
    assert "was sampled with run.seed 5, this run has 0: no key is the same" in capsys.readouterr().err
    assert main(["train", "--config", str(file), "--rollouts", str(tmp_path), "--dry-run"]) == 2
    assert f"{tmp_path} is no run folder" in capsys.readouterr().err


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decode steps of each phase to come."""
    phase, steps = RolloutStream.phase, list[int]()

    def counted(self: RolloutStream, *args: Any, **named: Any) -> Collected:
        collected = phase(self, *args, **named)
        steps.append(collected.stats.num_decode_steps)
        return collected

    monkeypatch.setattr(RolloutStream, "phase", counted)
    return steps


def learned(run: Path) -> dict[int, str]:
    return read_weights_log(RunDir(path=run).weights_file)


def taken_over(run: Path) -> list[float]:
    return [row["rollout/num_taken_over"] for row in read_metrics(run / "metrics.jsonl")]


GRPO = {
    "rollout": "{prompts_per_iteration: 3, samples_per_prompt: 2}",
    "algorithm": "{kind: grpo}",
    "evaluation": "{every: 0}",
}
ITERATIONS = 3


@pytest.fixture(scope="module")
def parent(local_ray: None, tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent")
    file = write_config(
        folder, tiny_pair, f"iterations: {ITERATIONS}, state_every: 1, keep_states: 2", **GRPO
    )
    assert main(["train", "--config", str(file), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_of_the_same_config_learns_the_same_and_generates_nothing(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, run = counting(monkeypatch), tmp_path / "again"
    config = str(parent / "config.yaml")
    assert main(["train", "--config", config, "--rollouts", str(parent), "--out", str(run)]) == 0
    assert learned(run) == learned(parent) and len(learned(run)) == ITERATIONS + 1
    assert steps == [0] * ITERATIONS and taken_over(run) == [6.0] * ITERATIONS
    assert f"samples of {parent} are taken over while weights are equal" in capsys.readouterr().out
    assert main(["verify", str(run), "--share", "1", "--engines", "1"]) == 0
    assert "0 differences" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_of_another_reward_takes_over_until_its_weights_part(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, run = counting(monkeypatch), tmp_path / "mended"
    mended = ["--set", "reward.shaping.length_penalty=0.1", "--set", "run.iterations=2"]
    config = str(parent / "config.yaml")
    assert main(["train", "--config", config, "--rollouts", str(parent), *mended, "--out", str(run)]) == 0
    assert taken_over(run) == [6.0, 0.0] and steps[0] == 0 < steps[1]
    assert "iteration 2 and later ones are generated: weights are others" in capsys.readouterr().out
    alone = tmp_path / "alone"
    assert main(["train", "--config", config, *mended, "--out", str(alone)]) == 0
    assert learned(alone) == learned(run), "drafts and what is taken over change nothing"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


@pytest.mark.ray
@pytest.mark.slow
def test_a_fork_goes_on_from_a_state_and_leaves_the_run_as_it_is(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}
    steps, same, other = counting(monkeypatch), tmp_path / "same", tmp_path / "other"
    fork = ["fork", str(parent), "--at", "2"]
    assert main([*fork, "--out", str(same)]) == 0
    assert learned(same) == learned(parent) and steps == [0], "the third iteration is taken over"
    faster = [
        "--set",
        "trainer.learning_rate=2.0e-3",
        "--set",
        "run.iterations=4",
        "--set",
        "run.keep_states=3",
    ]
    assert main([*fork, *faster, "--out", str(other)]) == 0
    theirs = learned(parent)
    assert (
        learned(other) | {3: ""} == theirs | {3: "", 4: learned(other)[4]} and learned(other)[3] != theirs[3]
    )
    rows = read_metrics(other / "metrics.jsonl")
    assert [row["rollout/num_taken_over"] for row in rows] == [0.0, 0.0, 6.0, 0.0]
    assert [row["reward/mean"] for row in rows[:3]] == [
        row["reward/mean"] for row in read_metrics(parent / "metrics.jsonl")
    ]
    assert {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()} == before
    # its first state is its own: it is gone on with from there
    for number in (3, 4):
        shutil.rmtree(other / "checkpoints" / f"state_000{number}", ignore_errors=True)
    RunDir(path=other).set_status("interrupted", "killed")
    capsys.readouterr()
    assert main(["train", "--resume", str(other), "--dry-run"]) == 0
    assert "resumed after iteration 2 of 4" in capsys.readouterr().out
    for more, said in (
        (["--set", "algorithm.kl_coef=0.0"], "the state's trainers hold (critic, reference, trainer.lora)"),
        (["--set", "run.iterations=2"], "nothing is left to do after iteration 2 of 2"),
    ):
        assert main([*fork, *more, "--dry-run"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("at", "setting", "said"),
    [
        ("7", "run.name=x", "keeps no state after iteration 7: expected --at 0, got 7; run.state_every"),
        ("0", "run.seed=9", "this changes them: run.seed was 5, now 9; leave it out"),
        ("0", "data.limit=3", "data.limit was 40, now 3"),
        ("0", "rollout.samples_per_prompt=2", "rollout.samples_per_prompt was 1, now 2"),
        ("-1", "run.name=x", "--at expects a whole number from 0 on, got -1"),
    ],
)
def test_what_is_no_fork_is_refused(
    made: Path, at: str, setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fork", str(made), "--at", at, "--set", setting, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_a_fork_at_zero_begins_anew_with_the_config_and_the_record(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fork", str(made), "--at", "0", "--set", "reward.mean=1.0", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"record: {made}" in out and "mean: 1.0" in out and "seed: 5" in out
