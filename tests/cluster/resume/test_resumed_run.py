"""A run that is cut off and resumed, or loses a trainer, ends as the one left alone: every figure and bit.

The chat template of the first prints the day, and it is resumed and verified on another.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
import yaml
from loop_hooks import before_updates
from moved_clock import move_clock

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.summary import UPDATE_PARTS
from rlhfspec.cluster.resume.resumed_run import newest_run, open_run
from rlhfspec.cluster.system.system import System
from rlhfspec.core.checkpoint_manifest import MANIFEST, state_folders
from rlhfspec.core.config_io import load_config
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.metrics import read_metrics
from tests.conftest import TinyPair

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.ray, pytest.mark.slow]

_OF_THE_CLOCK = (
    "time/",
    "moves/",
    "rollout/goodput",
    "rollout/decode_s",
    "rollout/draft_s",
    *(f"update/{part}_s" for part in UPDATE_PARTS),
    "update/tokens_per_s",
    # how far a refit gets in its seconds, and what is accepted then
    "draft/",
    "rollout/acceptance_rate",
    "rollout/mean_acceptance_length",
)


def write_config(folder: Path, pair: TinyPair, run: str, **changes: str) -> Path:
    sections = {
        "run": f"{{name: tiny, output_dir: {folder / 'runs'}, {run}}}",
        "models": f"{{target: {pair.target}, draft: {pair.draft}}}",
        "data": "{task: chain, limit: 16}",
        "reward": "{kind: 'sample_rewards:vowel_share'}",
        "sampling": "{max_new_tokens: 24}",
        "speculation": "{policy: fixed}",
        "engine": "{max_running_samples: 4}",
        "rollout": "{prompts_per_iteration: 6}",
        "algorithm": "{kind: ppo, kl_coef: 0.01, kl_target: 0.02}",
        "trainer": "{minibatch_size: 3, num_threads: 1, learning_rate: 1.0e-3}",
        "drafter_training": "{budget_share: 1.0, max_passes: 2, learning_rate: 3.0e-3}",
        "evaluation": "{every: 1, holdout: 4, metric: eval/reward_mean}",
        "cluster": "{generation: {num_actors: 1}, dashboard: false}",
    }
    file = folder / "run.yaml"
    file.write_text("".join(f"{name}: {text}\n" for name, text in (sections | changes).items()))
    return file


def metrics(path: Path) -> list[dict]:
    """What the clock has no part in."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not name.startswith(_OF_THE_CLOCK)} for row in rows
    ]


def cut_off(run_dir: RunDir, folder: Path) -> RunDir:
    """A copy in `folder` as a kill in the second iteration leaves it, with files of that one."""
    cut = RunDir(path=Path(shutil.copytree(run_dir.path, folder / run_dir.path.name)))
    for state in state_folders(cut.checkpoints_folder):
        if state.name > "state_0001":
            shutil.rmtree(state)
    cut.set_status("interrupted", "killed")
    return cut


def sampled(run_dir: RunDir) -> list[list[list[int]]]:
    files = sorted((run_dir.path / "rollouts").glob("*.parquet"))
    return [pq.read_table(file)["response_token_ids"].to_pylist() for file in files]


def same(one: RunDir, other: RunDir) -> None:
    assert other.status()["state"] == "finished"
    for name in ("metrics.jsonl", "weights.jsonl", "histograms.jsonl", "evaluations.jsonl"):
        assert metrics(other.path / name) == metrics(one.path / name), name
    for folder in ("rollouts", "samples", "evaluations"):
        names = sorted(path.name for path in (one.path / folder).iterdir())
        assert sorted(path.name for path in (other.path / folder).iterdir()) == names


DATED = json.dumps("{{ strftime_now('%d %b %Y %H:%M') }} {{ messages[0].content }}")


@pytest.fixture(scope="module")
def finished(local_ray: None, tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("resumed")
    run = "iterations: 3, state_every: 1, keep_states: 3"
    data = f"{{task: chain, limit: 16, chat: true, chat_template: {DATED}}}"
    assert main(["train", "--config", str(write_config(folder, tiny_pair, run, data=data))]) == 0
    (path,) = (folder / "runs").iterdir()
    return RunDir.open(path)


def test_a_run_that_is_cut_off_and_loses_its_trainer_on_another_day_ends_as_the_one_left_alone(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = cut_off(finished, tmp_path)
    move_clock(monkeypatch, days=2, minutes=17)
    killed = []

    def strike(system: System) -> None:
        if system.target.manifest.weight_version == 2 and not killed:
            killed.append(system.trainers.first_name)
            ray.kill(system.trainers.first)

    before_updates(monkeypatch, strike)
    assert main(["train", "--resume", str(cut.path)]) == 0
    out = capsys.readouterr().out
    assert "resumed after iteration 1 of 3" in out
    assert "trainer was lost: trainer died while the loop waited for " in out
    assert "restart 1 of 3: the run goes on from its state after iteration 2" in out
    same(finished, cut)
    assert sampled(cut) == sampled(finished)
    assert main(["verify", str(cut.path), "--share", "1", "--engines", "1"]) == 0
    assert capsys.readouterr().out.endswith("\n0 differences\n")


def test_auto_takes_the_time_of_the_run_that_it_goes_on_with(
    finished: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = cut_off(finished, tmp_path)
    began = load_config(cut.config_file).run.template_time
    asked = load_config(cut.config_file, ["run.template_time=null"])
    move_clock(monkeypatch, days=2)
    resumed = newest_run(asked, tmp_path, lambda text: None)
    assert resumed is not None and resumed.config.run.template_time == began is not None
    other = load_config(cut.config_file, ["run.template_time=2001-01-01"])
    told: list[str] = []
    assert newest_run(other, tmp_path, told.append) is None
    assert "run.template_time was" in told[0], "a time that was asked for is never another's"


def forget_time(run_dir: RunDir) -> None:
    """Make the config one of a version that kept no time."""
    tree = yaml.safe_load(run_dir.config_file.read_text())
    del tree["run"]["template_time"]
    run_dir.config_file.write_text(yaml.safe_dump(tree))
    for state in state_folders(run_dir.checkpoints_folder):
        # nor did its states keep the config
        (state / "config.yaml").unlink()
        told = json.loads((state / MANIFEST).read_text())
        del told["files"]["config.yaml"]
        (state / MANIFEST).write_text(json.dumps(told))


def test_a_run_of_a_version_that_kept_no_time_has_that_of_its_folder(
    finished: RunDir, tmp_path: Path
) -> None:
    cut = cut_off(finished, tmp_path)
    began = load_config(cut.config_file).run.template_time
    forget_time(cut)
    resumed = open_run(cut.path, [], lambda text: None)
    stamp = cut.path.name.removeprefix("tiny-")
    at = str(resumed.config.run.template_time)
    assert at.replace("-", "").replace(":", "").replace("T", "-").startswith(stamp)
    given = open_run(cut.path, [f"run.template_time={began}"], lambda text: None)
    assert given.config.run.template_time == began
    other = cut_off(finished, tmp_path / "other").path
    with pytest.raises(ConfigError, match="template_time was"):
        open_run(other, ["run.template_time=2001-01-01"], lambda text: None)


LONGER = "iterations: 6, state_every: 2"
CASES = {
    "ppo": {},
    "grpo, adapters, two trainers": {
        "algorithm": "{kind: grpo}",
        "rollout": "{prompts_per_iteration: 3, samples_per_prompt: 3}",
        "trainer": "{minibatch_size: 3, num_threads: 1, learning_rate: 1.0e-2, lora: {rank: 4}}",
        "cluster": "{generation: {num_actors: 1}, trainer: {num_actors: 2, num_cpus: 0.25}, dashboard: false}",
    },
}


def start(*argv: str) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    return subprocess.Popen(
        [sys.executable, "-m", "rlhfspec.cluster.cli", "train", *argv],
        env=environment | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )


def ended(child: subprocess.Popen) -> str:
    try:
        out, _ = child.communicate(timeout=900)
    finally:
        child.kill()
    assert child.returncode == 0, out
    return out


def new_run(folder: Path, known: set[Path], child: subprocess.Popen) -> RunDir:
    while not (found := set((folder / "runs").glob("*/metrics.jsonl")) - known):
        assert child.poll() is None, child.communicate()[0]
        time.sleep(0.05)
    return RunDir(path=found.pop().parent)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "number"),
    [*((case, signal.SIGKILL) for case in CASES), ("ppo", signal.SIGINT)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_a_run_whose_driver_is_killed_again_and_again_ends_as_the_one_left_alone(
    case: str, number: signal.Signals, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    rng = random.Random(case)
    file = write_config(tmp_path, tiny_pair, LONGER, **CASES[case])
    ended(start("--config", str(file)))
    (alone,) = (RunDir(path=path) for path in (tmp_path / "runs").iterdir())
    child = start("--config", str(file))
    run_dir = new_run(tmp_path, {alone.metrics_file}, child)
    for kill in range(int(os.environ.get("RLHFSPEC_KILLS", "3"))):
        target = rng.randrange(3, 6)
        while len(read_metrics(run_dir.metrics_file)) < target and child.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        child.send_signal(number)  # SIGINT is Ctrl-C
        child.communicate()
        print(f"kill {kill}: {len(read_metrics(run_dir.metrics_file))} iterations written")
        if run_dir.status()["state"] == "finished":
            return same(alone, run_dir)
        assert state_folders(run_dir.checkpoints_folder)
        how = ("--config", str(file), "--resume", "auto") if kill % 2 else ("--resume", str(run_dir.path))
        child = start(*how)
    assert "resumed after iteration" in ended(child)
    same(alone, run_dir)


@pytest.mark.long
def test_one_trainer_of_two_that_freezes_before_there_is_a_state_makes_the_run_begin_anew(
    local_ray: None,
    tiny_pair: TinyPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES["grpo, adapters, two trainers"]
    cluster = case["cluster"].replace("dashboard", "heartbeat_timeout_s: 10, dashboard")
    file = write_config(tmp_path, tiny_pair, "iterations: 3, state_every: 0", **(case | {"cluster": cluster}))
    assert main(["train", "--config", str(file)]) == 0
    (alone,) = (RunDir(path=path) for path in (tmp_path / "runs").iterdir())
    frozen = []

    def strike(system: System) -> None:
        if system.target.manifest.weight_version == 1 and not frozen:
            trainer = system.trainers.handles["trainer-1"]
            frozen.append(ray.get(trainer.__ray_call__.remote(lambda _: os.getpid())))
            os.kill(frozen[0], signal.SIGSTOP)

    before_updates(monkeypatch, strike)
    assert main(["train", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    assert "trainer-1 was lost: trainer-1 gave no sign of life for 1" in out
    assert "restart 1 of 3: the run goes on from its beginning" in out
    same(alone, RunDir(path=max((tmp_path / "runs").iterdir())))


@pytest.mark.long
def test_a_process_whose_run_another_has_taken_ends_and_writes_nothing_more(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = cut_off(finished, tmp_path)

    def strike(system: System) -> None:
        if system.target.manifest.weight_version == 2:
            assert (other := RunDir.open(cut.path)).owner.claim(after=other.owner.last())

    before_updates(monkeypatch, strike)
    assert main(["train", "--resume", str(cut.path)]) == 1
    assert f"was taken up by process {os.getpid()} on " in capsys.readouterr().err
    assert cut.rollouts_file(1).exists() and not cut.rollouts_file(2).exists()
    assert cut.status()["state"] == "running", "the other's, as it was"
    assert len(cut.metrics_file.read_text().splitlines()) == 2
    monkeypatch.undo()
    # as if the other had ended
    cut.set_status("interrupted")
    assert main(["train", "--resume", str(cut.path)]) == 0
    same(finished, cut)
