"""A run whose chat template prints the day: begun on one, resumed and verified on another, to the same result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from moved_clock import move_clock

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.resume.resumed_run import newest_run, open_run
from rlhfspec.core.checkpoint_manifest import MANIFEST, state_folders
from rlhfspec.core.config_io import load_config
from rlhfspec.core.errors import ConfigError
from tests.conftest import TinyPair

pytestmark = pytest.mark.ray
DATED = "{{ strftime_now('%d %b %Y %H:%M') }} {{ messages[0].content }}"


@pytest.fixture(scope="module")
def finished(local_ray: None, tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dated")
    tree = {
        "run": {"name": "dated", "output_dir": str(folder / "runs"), "iterations": 2, "state_every": 1},
        "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
        "data": {"task": "chain", "limit": 12, "chat": True, "chat_template": DATED},
        "sampling": {"max_new_tokens": 8},
        "rollout": {"prompts_per_iteration": 4},
        "trainer": {"num_threads": 1},
        "engine": {"max_running_samples": 4},
        "speculation": {"policy": "fixed"},
        "cluster": {"generation": {"num_actors": 1}, "dashboard": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", "--config", str(folder / "run.yaml")]) == 0
    (path,) = (folder / "runs").iterdir()
    return path


def cut_off(run: Path, folder: Path) -> Path:
    """As a kill in the second iteration leaves it, in a folder of the same name."""
    cut = Path(shutil.copytree(run, folder / run.name))
    for state in state_folders(cut / "checkpoints"):
        if state.name > "state_0001":
            shutil.rmtree(state)
    RunDir(path=cut).set_status("interrupted", "killed")
    return cut


def forget_time(run: Path) -> None:
    """Make the config one of a version that kept no time."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    del tree["run"]["template_time"]
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    for state in state_folders(run / "checkpoints"):
        # nor did its states keep the config
        (state / "config.yaml").unlink()
        told = json.loads((state / MANIFEST).read_text())
        del told["files"]["config.yaml"]
        (state / MANIFEST).write_text(json.dumps(told))


def sampled(run: Path) -> list[list[dict[str, object]]]:
    import pyarrow.parquet as pq

    return [pq.read_table(file).to_pylist() for file in sorted((run / "rollouts").glob("*.parquet"))]


def test_a_run_goes_on_on_another_day_and_is_verified_there(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = cut_off(finished, tmp_path)
    move_clock(monkeypatch, days=2, minutes=17)
    assert main(["train", "--resume", str(cut)]) == 0
    assert [[row["response_token_ids"] for row in file] for file in sampled(cut)] == [
        [row["response_token_ids"] for row in file] for file in sampled(finished)
    ]
    capsys.readouterr()
    assert main(["verify", str(cut), "--share", "1", "--engines", "1"]) == 0
    assert capsys.readouterr().out.endswith("\n0 differences\n")


def test_auto_takes_the_time_of_the_run_that_it_goes_on_with(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = cut_off(finished, tmp_path)
    began = load_config(cut / "config.yaml").run.template_time
    asked = load_config(cut / "config.yaml", ["run.template_time=null"])
    move_clock(monkeypatch, days=2)
    resumed = newest_run(asked, tmp_path, lambda text: None)
    assert resumed is not None and resumed.config.run.template_time == began is not None
    other = load_config(cut / "config.yaml", ["run.template_time=2001-01-01"])
    told: list[str] = []
    assert newest_run(other, tmp_path, told.append) is None
    assert "run.template_time was" in told[0], "a time that was asked for is never another's"


def test_a_run_of_a_version_that_kept_no_time_has_that_of_its_folder(finished: Path, tmp_path: Path) -> None:
    cut = cut_off(finished, tmp_path)
    began = load_config(cut / "config.yaml").run.template_time
    forget_time(cut)
    resumed = open_run(cut, [], lambda text: None)
    stamp = finished.name.removeprefix("dated-")
    at = str(resumed.config.run.template_time)
    assert at.replace("-", "").replace(":", "").replace("T", "-").startswith(stamp)
    given = open_run(cut, [f"run.template_time={began}"], lambda text: None)
    assert given.config.run.template_time == began
    with pytest.raises(ConfigError, match="template_time was"):
        open_run(cut_off(finished, tmp_path / "other"), ["run.template_time=2001-01-01"], lambda text: None)
