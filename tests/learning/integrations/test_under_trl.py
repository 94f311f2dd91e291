"""TRL itself trains with our rollouts: each release that `python -m rlhfspec.benchmarks.peers.build --only trl` got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from byte_chat import save_byte_pair

from rlhfspec.benchmarks.peers.build import TRL_RELEASES, trl_folder

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """What one release has measured is kept for the next."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.slow
@pytest.mark.parametrize("release", TRL_RELEASES)
def test_trl_gets_our_responses_and_its_own_log_probabilities(tmp_path, home, release):
    folder = trl_folder(release)
    if folder is None:
        pytest.skip(
            f"TRL {release} is not there: python -m rlhfspec.benchmarks.peers.build --only trl (make bench-peers)"
        )
    save_byte_pair(tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", ROOT / "tests" / "helpers" / "trl_run.py"),
            *(tmp_path, ROOT / "docs" / "examples" / "trl_grpo.py"),
        ],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": "", "HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["release"] == release
    assert [step["step"] for step in got["steps"]] == [0, 1, 2]
    for step in got["steps"]:
        assert step["templated_alike"]
        assert step["equal"], "not the responses of our engine alone with the step's weights"
        assert step["difference"] < 1e-5
    # a first token's log-probability depends on weights and token alone: had none been published, they would agree
    first = [{ids[0]: values[0] for ids, values in zip(*pair, strict=True)} for pair in pairs(got["steps"])]
    assert first[0] != first[2]
    assert len(got["example_losses"]) == 3
    assert got["rewards"] == [0.5] * 4
    # TRL counts what was sampled: two turns of three tokens at most, and not what was given between
    assert 2 <= got["mean_length"] <= 6


def pairs(steps):
    return [(step["completion_ids"], step["logprobs"]) for step in steps]
