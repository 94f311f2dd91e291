"""`rlhfspec train` from a file to a run folder, and what is left when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import learning.data
from cluster.cli import main
from cluster.rundir import RunDir
from core.checkpoint_manifest import verify_checkpoint
from core.metrics import read_metrics
from learning.records_io import Row
from tests.conftest import TinyPair

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
    encode = learning.data._encode

    def counting(row: Row, *args: Any) -> list[int]:
        seen.append(row.origin)
        return encode(row, *args)

    monkeypatch.setattr(learning.data, "_encode", counting)
    return seen


@pytest.mark.usefixtures("local_ray")
def test_a_run_leaves_a_complete_folder(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenised: list[str]
) -> None:
    assert main(["train", "--config", str(config_file)]) == 0
    assert len(tokenised) == len(set(tokenised)) == 16, "the check reads the prompts, the loop uses them"
    run_dir = only_run(tmp_path)
    out = capsys.readouterr().out.replace("\n", "")
    assert out.startswith(f"run folder {run_dir.path}")
    for part in ("iteration 1/2", "iteration 2/2", "summary", "16"):
        assert part in out
    status = run_dir.status()
    assert (status["state"], status["reason"], status["iteration"]) == ("finished", "", 1)
    assert [row["iteration"] for row in read_metrics(run_dir.metrics_file)] == [0, 1]
    assert pq.read_table(run_dir.rollouts_file(1)).num_rows == 8
    assert run_dir.picture_file.stat().st_size > 0
    assert run_dir.timeline_file.stat().st_size > 0 and run_dir.timeline_picture_file.stat().st_size > 0
    assert "iterations" in run_dir.summary_file.read_text()
    for model in ("target", "draft"):
        checkpoint = run_dir.checkpoint_dir(model)
        assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 0
        assert AutoTokenizer.from_pretrained(checkpoint).eos_token_id is not None
        assert verify_checkpoint(checkpoint)["weight_version"] == 2
    assert not list(run_dir.path.rglob(".partial-*"))


@pytest.mark.usefixtures("local_ray")
def test_a_broken_reward_function_ends_the_run_naming_the_sample(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "--config", str(config_file), "--set", "reward.kind=sample_rewards:broken"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: reward function sample_rewards:broken, sample ")
    assert "expected a finite number" in error and "Traceback" not in error
    status = only_run(tmp_path).status()
    assert status["state"] == "failed" and "sample_rewards:broken" in status["reason"]
