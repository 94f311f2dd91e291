"""`rlhfspec train` from a file to a run folder, and what is left when it fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlhfspec.cluster.plan.run_profile
import rlhfspec.cluster.run.loop
from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.live_page import LivePage
from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.metrics import read_metrics
from rlhfspec.learning.data.prompt_rows import Row
from rlhfspec.learning.data.prompt_tokens import PromptEncoder, Rendered
from tests.conftest import TinyPair

ROOT = Path(__file__).resolve().parents[2]
ONE_INSTANCE = "cluster.generation.num_actors=1"
"Where how a run ends is tested: half the time goes into importing torch in actors."
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def config_file(tmp_path: Path, tiny_pair: TinyPair) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
run: {{name: tiny, output_dir: {tmp_path / "runs"}, iterations: 2}}
models: {{target: {tiny_pair.target}, draft: {tiny_pair.draft}}}
data: {{task: chain, limit: 16}}
sampling: {{max_new_tokens: 24}}
speculation: {{policy: fixed}}
engine: {{max_running_samples: 4}}
rollout: {{prompts_per_iteration: 8}}
trainer: {{minibatch_size: 8, num_threads: 1, max_tokens_per_forward: 512}}
"""
    )
    return file


def only_run(tmp_path: Path) -> RunDir:
    (folder,) = (tmp_path / "runs").iterdir()
    return RunDir.open(folder)


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts tokenised for the data set in this process, one entry each time."""
    seen: list[str] = []
    render = PromptEncoder.render

    def counting(self: PromptEncoder, row: Row) -> Rendered:
        seen.append(row.origin)
        return render(self, row)

    monkeypatch.setattr(PromptEncoder, "render", counting)
    return seen


@pytest.mark.usefixtures("local_ray")
def test_a_run_that_measures_its_profile_first_leaves_a_complete_folder(
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tokenised: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rlhfspec.cluster.plan.run_profile, "AUTO_BUDGET_S", 1.5)
    changes = ["speculation.policy=goodput", f"run.cache_dir={tmp_path / 'cache'}"]
    assert main(["train", "--config", str(config_file), *(w for one in changes for w in ("--set", one))]) == 0
    assert len(list((tmp_path / "cache" / "profiles").iterdir())) == 1
    assert len(tokenised) == len(set(tokenised)) == 16, "the check reads the prompts, the loop uses them"
    run_dir = only_run(tmp_path)
    out = capsys.readouterr().out.replace("\n", "")
    assert out.startswith(f"run folder {run_dir.path}")
    for part in ("profile", "iteration 1/2", "iteration 2/2", "summary", "16"):
        assert part in out
    status = run_dir.status()
    assert (status["state"], status["reason"], status["iteration"]) == ("finished", "", 1)
    metrics = read_metrics(run_dir.metrics_file)
    assert [row["iteration"] for row in metrics] == [0, 1]
    assert all(row["rollout/mean_acceptance_length"] >= 1.0 for row in metrics)
    assert pq.read_table(run_dir.rollouts_file(1)).num_rows == 8
    assert run_dir.timeline_file.stat().st_size > 0
    assert "iterations" in run_dir.summary_file.read_text()
    for model in ("target", "draft"):
        checkpoint = run_dir.checkpoint_dir(model)
        assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 0
        assert AutoTokenizer.from_pretrained(checkpoint).eos_token_id is not None
        # a refit of the draft may be given up
        assert verify_checkpoint(checkpoint)["weight_version"] in ((2,) if model == "target" else (0, 1, 2))
    page = LivePage.read(run_dir.live_file)
    assert page is not None and page.ended and page.iteration == 1
    assert {path.stem for path in run_dir.logs_folder.iterdir()} >= {
        "loop",
        "scheduler",
        "trainer",
        "reward-0",
        "gen-0",
    }
    assert [run_dir.trace_file(number).is_file() for number in (0, 1, 2)] == [True, True, False]
    assert not list(run_dir.path.rglob(".partial-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB; only where mounting is permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.usefixtures("local_ray")
def test_a_full_disk_ends_the_run_with_one_line_and_keeps_what_was_finished(
    config_file: Path, small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    really = rlhfspec.cluster.run.loop.save_checkpoints

    def save_and_fill(*args: Any, **kwargs: Any) -> None:
        really(*args, **kwargs)
        with suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    monkeypatch.setattr(rlhfspec.cluster.run.loop, "save_checkpoints", save_and_fill)
    settings = [f"run.output_dir={small_disk / 'runs'}", "run.checkpoint_every=1", ONE_INSTANCE]
    argv = ["train", "--config", str(config_file), *(word for one in settings for word in ("--set", one))]
    assert main(argv) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("error: cannot write ")
    assert "'No space left on device' with 0 bytes free there; free space there" in error[0]
    run_dir = only_run(small_disk)
    status = run_dir.status()
    assert status["state"] == "failed" and error[0] == f"error: {status['reason']}"
    assert not list(run_dir.path.rglob(".partial-*"))
    assert not [path for path in run_dir.path.rglob("*") if path.is_file() and not path.stat().st_size]
    for model in ("target", "draft"):
        verify_checkpoint(run_dir.checkpoint_dir(model, 0))
    assert sorted(path.name for path in (run_dir.path / "checkpoints").iterdir()) == [
        "draft_0000",
        "target_0000",
    ]
    assert [row["iteration"] for row in read_metrics(run_dir.metrics_file)] == [0]


def test_sigterm_leaves_the_run_interrupted_and_exits_with_143(config_file: Path, tmp_path: Path) -> None:
    many = ["--set", "run.iterations=100000", "--set", "cluster.dashboard=false", "--set", ONE_INSTANCE]
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    child = subprocess.Popen(
        [sys.executable, "-m", "rlhfspec.cluster.cli", "train", "--config", str(config_file), *many],
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("runs/*/metrics.jsonl")):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        run_dir = only_run(tmp_path)
        assert run_dir.status()["state"] == "running" and run_dir.status()["pid"] == child.pid
        child.send_signal(signal.SIGTERM)
        _, error = child.communicate(timeout=120)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, error) == (143, "")
    status = run_dir.status()
    assert status["state"] == "interrupted"
    # whether a state was kept by then is a matter of time
    assert status["reason"].startswith("stopped by SIGTERM (ray job stop, or kill); ")
    assert "iterations" in run_dir.summary_file.read_text()
    assert not list(run_dir.path.rglob(".partial-*"))


@pytest.mark.usefixtures("local_ray")
def test_a_broken_reward_function_ends_the_run_naming_the_sample(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "reward.kind=sample_rewards:broken"
    argv = ["train", "--config", str(config_file), "--set", broken, "--set", ONE_INSTANCE]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: reward function sample_rewards:broken, sample ")
    assert "expected a finite number" in error and "Traceback" not in error
    status = only_run(tmp_path).status()
    assert status["state"] == "failed" and "sample_rewards:broken" in status["reason"]
