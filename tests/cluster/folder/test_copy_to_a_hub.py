"""`run.copy_to: hf://user/repo`: what `huggingface_hub` makes of a copy, against a server of the hub's protocol."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import LFS_FROM, Hub, hub_server
from huggingface_hub import HfApi, HfFileSystem, constants

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.remote_copy import RemoteCopy, fetch_newest, fetch_run, require_place
from rlhfspec.core.checkpoint_manifest import MANIFEST, verify_checkpoint, write_manifest
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError

CONFIG = config_from_dict({"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}})
PLACE, NAME = "hf://user/repo", "demo-20260101-120000"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With its repository. As HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET say, which are read at the import."""
    with hub_server() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        HfFileSystem.clear_instance_cache()
        HfApi(endpoint=hub.url).create_repo("user/repo")
        yield hub
    HfFileSystem.clear_instance_cache()
    huggingface_hub.close_session()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(CONFIG, tmp_path / "here" / NAME)
    state(run_dir, 1)
    return run_dir


def state(run_dir: RunDir, number: int) -> Path:
    folder = run_dir.checkpoint_dir("state", number)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "weights").write_bytes(bytes([number]) * 10 * LFS_FROM)
    write_manifest(folder, model="state", weight_version=number, parameter_checksum="ab")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "remote_copy.json"
    }


def test_a_copy_on_the_hub_follows_the_folder_and_comes_back_whole(
    hub: Hub, run_dir: RunDir, tmp_path: Path
) -> None:
    notes = list[str]()
    require_place(PLACE, run_dir.path)
    copy = RemoteCopy(run_dir, PLACE, notes.append)
    assert copy.bring_up_to_date(), notes
    assert "PUT /lfs/" in " ".join(hub.asked) and "Bearer hf_of_the_test" in hub.tokens
    shutil.rmtree(run_dir.checkpoint_dir("state", 1))
    state(run_dir, 2)
    assert copy.bring_up_to_date(), notes
    there = {name.removeprefix(f"{NAME}/"): content for name, content in hub.repos["user/repo"].items()}
    assert there == files_of(run_dir.path) and f"checkpoints/state_0002/{MANIFEST}" in there

    num_asked = len(hub.asked)
    resumed = RemoteCopy(run_dir, PLACE, notes.append)
    hub.repos["user/repo"][f"{NAME}/config.yaml"] = bytes(len(there["config.yaml"]))
    assert resumed.bring_up_to_date(), notes
    commits = [one for one in hub.asked[num_asked:] if "/commit/" in one]
    assert len(commits) == 1, "what another wrote there, of equal length too, is sent again, and nothing else"

    fetch_newest(PLACE, "demo", tmp_path / "newest", notes.append)
    assert files_of(tmp_path / "newest" / NAME) == there
    back = fetch_run(copy.url, tmp_path / "back", notes.append)
    assert files_of(back) == there and verify_checkpoint(back / "checkpoints" / "state_0002")


@pytest.mark.parametrize(
    ("status", "said"), [(401, "401"), (500, "500"), (None, "repository and revision exist")]
)
def test_what_the_hub_refuses_is_one_line_with_the_url(
    status: int | None, said: str, hub: Hub, run_dir: RunDir, tmp_path: Path
) -> None:
    hub.fault = status
    hub.repos.clear()
    notes = list[str]()
    copy = RemoteCopy(run_dir, PLACE, notes.append)
    assert not copy.bring_up_to_date()
    assert not copy.bring_up_to_date()
    (note,) = notes
    assert note.startswith(f"the copy at {PLACE}/{NAME} is not up to date: ") and said in note
    assert "\n" not in note and note.endswith("it is tried again")
    with pytest.raises(ConfigError, match=f"{PLACE}/{NAME}") as caught:
        fetch_run(f"{PLACE}/{NAME}", tmp_path / "back", notes.append)
    assert "\n" not in str(caught.value)
    hub.fault = None
    HfApi(endpoint=hub.url).create_repo("user/repo")
    assert copy.bring_up_to_date(), "once the hub answers"
