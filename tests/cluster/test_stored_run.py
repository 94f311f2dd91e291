"""A run that earlier code left behind: its samples are generated again to the bit, and its state is gone on with.

Made at bc7e50d: GRPO on a tiny pair, three iterations, of which the state after two and all rollouts are kept. The
weights after the third are those that its state was gone on to since groups stay together in minibatches and are
computed as trees, and log-probabilities are written anew (5e-7 away at most, no token changed) since exponentials and
inner dimensions are added up by four parts, as the ranks of a group would: float32 adds up in another order.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.verify.verify_run import verify_run

STORED = Path(__file__).resolve().parents[1] / "stored_run"
MADE_ON = ("znver4", "AVX512", "2.13.0")
"Processor, what of it may be used, and torch: another of them may round otherwise."
NUM_SAMPLES = 36


def made_here() -> bool:
    llvm = pytest.importorskip("llvmlite.binding", reason="the stored run decoded by our own kernels")
    uses = torch.backends.cpu.get_cpu_capability()
    return (llvm.get_host_cpu_name(), uses, torch.__version__.split("+")[0]) == MADE_ON


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    if not made_here():
        pytest.skip(f"the stored run was made on {MADE_ON}")
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    state = run / "checkpoints" / "state_0002"
    for config in (run / "config.yaml", state / "config.yaml"):
        config.write_text(config.read_text().replace("FOLDER", str(tmp_path)))
    manifest = json.loads((state / "rlhfspec-manifest.json").read_text())
    whole = (state / "config.yaml").read_bytes()
    manifest["files"]["config.yaml"] = {
        "num_bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }
    (state / "rlhfspec-manifest.json").write_text(json.dumps(manifest))
    return RunDir(path=run)


def test_its_samples_are_generated_again_to_the_bit(run: RunDir) -> None:
    verification = verify_run(run.path, share=1.0)
    assert verification.holds and verification.num_regenerated == NUM_SAMPLES


@pytest.mark.ray
@pytest.mark.slow
def test_its_state_is_gone_on_with_to_the_same_weights(local_ray: None, run: RunDir) -> None:
    log = run.path / "weights.jsonl"
    before = [json.loads(line) for line in log.read_text().splitlines()]
    assert before[-1]["weight_version"] == 3
    run.set_status("interrupted", "killed")
    assert main(["train", "--resume", str(run.path)]) == 0
    assert [json.loads(line) for line in log.read_text().splitlines()] == before
