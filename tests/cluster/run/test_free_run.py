"""The free schedule on real actors: versions come in the midst of responses, and every one can be generated again.

An instance is lost in the midst of it; in the long proof the run is also resumed from a state with samples in flight.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from loop_hooks import beside_updates

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.run.update import Update
from rlhfspec.cluster.system.system import System
from rlhfspec.cluster.verify.verify_run import verify_run
from rlhfspec.core.checkpoint_manifest import state_folders
from tests.cluster.run.test_pipelined_run import kill_an_instance, train, tree
from tests.conftest import TinyPair

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SAMPLES, ITERATIONS, STALENESS, TOKENS = 12, 5, 2, 90


@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_free_run_that_loses_an_instance_can_be_generated_again(
    local_ray: None, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    killed = kill_an_instance(monkeypatch)
    _cut_early(monkeypatch)
    config = tree(tiny_pair, tmp_path)
    config["run"]["iterations"] = ITERATIONS
    config["sampling"]["max_new_tokens"] = TOKENS
    config["rollout"] |= {"prompts_per_iteration": SAMPLES, "max_staleness": STALENESS, "schedule": "free"}
    config["rollout"]["over_provisioning"] = 1.5
    # most samples are still in line when a batch is whole
    config["engine"]["max_running_samples"] = 1
    config["speculation"] = {"policy": "off", "drafter": "none"}
    run = train(config, tmp_path)
    assert killed
    _require_whole(run)
    if not resumes:
        return

    cut = shutil.copytree(run.path, tmp_path / "cut")
    for folder in state_folders(cut / "checkpoints"):
        if folder.name > "state_0002":
            shutil.rmtree(folder)
    assert list((cut / "checkpoints" / "state_0002" / "in_flight").glob("*_open.parquet"))
    RunDir(path=cut).set_status("interrupted", "killed")
    assert main(["train", "--resume", str(cut)]) == 0
    _require_whole(RunDir.open(cut))


def _cut_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the first two phases when their update begins, on a slow machine too: samples are under way by then."""
    cut_under = list[int]()

    def look(update: Update, system: System) -> None:
        version = system.target.manifest.weight_version
        if system.is_learning and version < 2 and version not in cut_under:
            cut_under.append(version)
            system.scheduler.cut()

    beside_updates(monkeypatch, look)


def _require_whole(run: RunDir) -> None:
    """Each sample is learned from once, none too late, some are of several versions, and all are what they should."""
    indices, num_versions = [], Counter()
    for iteration in range(ITERATIONS):
        rows = pq.read_table(run.rollouts_file(iteration)).to_pylist()
        assert len(rows) == SAMPLES
        own = [row["sample_index"] for row in rows]
        assert own == sorted(own)
        indices += own
        for row in rows:
            versions = row["span_versions"] or [row["weight_version"]]
            assert versions == sorted(versions) and 0 <= iteration - versions[0] <= STALENESS
            assert row["finish_reason"] in ("stop", "length")
            num_versions[len(set(versions))] += 1
    assert sorted(indices) == list(range(ITERATIONS * SAMPLES))
    assert num_versions[2] + num_versions[3], "some responses are of several versions"
    verification = verify_run(run.path, share=1.0)
    assert verification.holds and verification.num_regenerated == ITERATIONS * SAMPLES
