"""The profile of a run: measured once, cached, read from a folder, refused where it does not belong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hand_profile import hand_cost, hand_profile

import rlhfspec.cluster.plan.run_profile
from rlhfspec.cluster.cli import main
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.drafts import DraftModel
from rlhfspec.cluster.plan.inputs import read_inputs
from rlhfspec.cluster.plan.run_profile import RunProfile
from rlhfspec.cluster.ray_start.origin import ROOT
from rlhfspec.core.config_io import load_config
from rlhfspec.core.errors import ProfileError
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.profiles.profile import load_profile
from tests.conftest import TinyPair


@pytest.fixture
def config_file(tmp_path: Path, tiny_pair: TinyPair) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
run: {{name: tiny, output_dir: {tmp_path / "runs"}, cache_dir: {tmp_path / "cache"}, iterations: 1}}
models: {{target: {tiny_pair.target}, draft: {tiny_pair.draft}}}
data: {{task: chain, limit: 16}}
sampling: {{max_new_tokens: 40}}
speculation: {{policy: goodput}}
engine: {{max_running_samples: 4}}
rollout: {{prompts_per_iteration: 8}}
trainer: {{minibatch_size: 8, num_threads: 1, max_tokens_per_forward: 512}}
"""
    )
    return file


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlhfspec.cluster.plan.run_profile, "AUTO_BUDGET_S", 1.5)


@pytest.fixture
def read(config_file: Path):
    def load(*changes: str) -> RunProfile:
        config = load_config(config_file, list(changes))
        return RunProfile(config, read_inputs(config))

    return load


@pytest.mark.usefixtures("short")
def test_auto_measures_once_and_then_reads_the_cache(read, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = read()
    first = profile.resolve(Reporter())
    assert first is not None and first.max_samples == 4
    monkeypatch.setattr(RunProfile, "measure", lambda *a, **k: pytest.fail("measured again"))
    assert profile.resolve(Reporter()) == first
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        read("engine.max_running_samples=3").resolve(Reporter())


@pytest.mark.parametrize("error", [0.25, 0.31])
def test_a_profile_of_a_busy_machine_is_told_at_every_start(
    read, monkeypatch: pytest.MonkeyPatch, capsys, error: float
) -> None:
    made = replace(hand_profile(0.5, hand_cost()), quality={"verify_cost_median_rel_error": error})
    measured = iter([SimpleNamespace(profile=made, costs=None, drafts=None)])
    monkeypatch.setattr(RunProfile, "measure", lambda *a, **k: next(measured))
    for _ in ("measured", "kept"):
        assert read().resolve(Reporter()) == made
        text = " ".join(capsys.readouterr().out.split())
        assert ("31% off the fit to its first in the median, expected at most 25%" in text) == (error > 0.25)


@pytest.mark.usefixtures("short")
def test_a_group_measures_what_its_own_steps_cost(read) -> None:
    alone, group = read(), read("cluster.generation.tensor_parallel=2")
    profile = group.resolve(Reporter())
    assert profile is not None and profile.provenance.num_ranks == 2
    with pytest.raises(ProfileError, match="num_ranks is '1', measured with '2'"):
        profile.provenance.require_match(alone.described(), where="it")


def test_a_pair_is_described_by_its_files_as_by_transformers(read, monkeypatch: pytest.MonkeyPatch) -> None:
    by_files = read().described()
    monkeypatch.setattr(rlhfspec.cluster.plan.run_profile, "load_weights", load_causal_lm)
    monkeypatch.setattr(DraftModel, "weights", DraftModel.read)
    assert replace(read().described(), date=by_files.date) == by_files


CHECKED = """
import sys
from pathlib import Path
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_profile import RunProfile
from rlhfspec.cluster.run.prepared_run import prepare_run
plan = prepare_run(Path(sys.argv[1]), [], Reporter(), dry_run=True).plan
RunProfile(plan.config, plan.inputs).described()
print("modeling", *(name for name in sys.modules if "modeling_utils" in name or "models.llama.modeling" in name))
"""


def test_a_pair_of_ours_is_checked_and_described_without_transformers_modules(config_file: Path) -> None:
    """To import them takes longer than all else of a check."""
    words = [sys.executable, "-c", CHECKED, str(config_file)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "modeling"


@pytest.mark.parametrize("change", ["speculation.policy=fixed", "speculation.drafter=none"])
def test_other_policies_need_no_profile(read, change: str) -> None:
    assert read(change).resolve(Reporter()) is None


def test_auto_never_measures_for_gpus_in_the_starting_process(read) -> None:
    profile = read("cluster.generation.num_gpus=1")
    with pytest.raises(
        ProfileError, match="run `rlhfspec profile --config FILE --out DIR` on a node with such a GPU"
    ):
        profile.resolve(Reporter())


def test_a_folder_without_a_profile_is_bad_input(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--set", f"speculation.profile={tmp_path / 'nothing'}"]
    assert main(["train", "--config", str(config_file), *changes]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no profile at")
    assert "rlhfspec profile --out" in error


def test_the_command_writes_tables_and_models_and_the_profile_serves(
    config_file: Path, tmp_path: Path, read, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile"
    assert main(["profile", "--config", str(config_file), "--out", str(out), "--budget", "1.5"]) == 0
    assert "verify_cost_median_rel_error" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {"profile.json", "costs.parquet", "drafts.parquet"}
    assert read(f"speculation.profile={out}").resolve(Reporter()) == load_profile(out)
    profile = read(f"speculation.profile={out}", "engine.max_running_samples=3", "sampling.top_p=0.9")
    with pytest.raises(ProfileError, match=r"sampling is .* num_slots is '3', measured with '4'"):
        profile.resolve(Reporter())


def test_a_budget_of_nothing_is_bad_input(config_file: Path, tmp_path: Path) -> None:
    command = ["profile", "--config", str(config_file), "--out", str(tmp_path / "p"), "--budget", "0"]
    assert main(command) == 2
