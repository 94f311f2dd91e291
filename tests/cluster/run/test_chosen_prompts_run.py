"""Groups that teach nothing are replaced ahead of learning, and solved prompts left out: a resumed run is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.verify.verify_run import verify_run
from rlhfspec.core.checkpoint_manifest import state_folders
from rlhfspec.core.metrics import read_metrics
from tests.conftest import TinyPair

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REWARD = """
def long_or_not(response: str) -> float:
    return float(len(response) % 3 > 0)
"""


def test_a_resumed_run_replaces_and_leaves_out_the_same(
    local_ray: None, tiny_pair: TinyPair, tmp_path: Path, capsys
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    config = {
        "run": {
            "iterations": 5,
            "seed": 5,
            "name": "chosen",
            "output_dir": str(tmp_path / "runs"),
            "cache_dir": str(tmp_path / "cache"),
            "state_every": 1,
            "keep_states": 5,
            "checkpoint_every": 1,
        },
        "models": {"target": str(tiny_pair.target), "draft": None},
        "data": {"task": "chain", "limit": 10, "easy_threshold": 1.0},
        "reward": {"kind": f"{tmp_path / 'rewards.py'}:long_or_not"},
        "sampling": {"max_new_tokens": 16},
        "speculation": {"drafter": "none", "policy": "off"},
        "rollout": {"prompts_per_iteration": 3, "samples_per_prompt": 2, "max_staleness": 2},
        "algorithm": {"kind": "dapo", "max_extra_groups": 4, "correction": {"kind": "tis"}},
        "trainer": {"minibatch_size": 6, "learning_rate": 1e-3, "num_threads": 1},
        "cluster": {"dashboard": False, "generation": {"num_actors": 1}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 0
    (last,) = [line for line in capsys.readouterr().out.splitlines() if "parameter checksum" in line]
    (path,) = (tmp_path / "runs").iterdir()
    assert verify_run(path, share=1.0).holds
    whole = RunDir.open(path)
    rows = read_metrics(whole.metrics_file)
    left, sampled = (
        [int(row[name]) for row in rows] for name in ("data/num_left", "rollout/num_groups_sampled")
    )
    assert 10 > left[1] >= left[-1] > 0 and max(sampled) > 3
    assert {row["learner/num_groups"] for row in rows} == {3.0}

    cut = shutil.copytree(path, tmp_path / "cut")
    for folder in state_folders(cut / "checkpoints"):
        if folder.name > "state_0002":
            shutil.rmtree(folder)
    RunDir(path=cut).set_status("interrupted", "killed")
    assert main(["train", "--resume", str(cut)]) == 0
    assert last in capsys.readouterr().out
    resumed = RunDir.open(cut)
    assert [int(row["data/num_left"]) for row in read_metrics(resumed.metrics_file)] == left
    for iteration in range(5):
        one, other = (
            pq.read_table(run.rollouts_file(iteration)).select(
                ["prompt_id", "sample_index", "response_token_ids"]
            )
            for run in (whole, resumed)
        )
        assert one.equals(other)
