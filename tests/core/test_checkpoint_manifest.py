"""A checkpoint is compared with its manifest, byte by byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhfspec.core.checkpoint_manifest import (
    MANIFEST,
    has_manifest,
    state_folders,
    state_number,
    verify_checkpoint,
    write_manifest,
)
from rlhfspec.core.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.json").write_text("{}")
    write_manifest(tmp_path, model="target", weight_version=3, parameter_checksum="abc")
    return tmp_path


def test_what_was_written_is_verified(folder: Path):
    assert has_manifest(folder) and not has_manifest(folder / "sub")
    tree = verify_checkpoint(folder)
    assert (tree["model"], tree["weight_version"], tree["parameter_checksum"]) == ("target", 3, "abc")
    assert sorted(tree["files"]) == ["model.safetensors", "sub/config.json"]
    (folder / "notes.txt").write_text("mine")
    verify_checkpoint(folder)


@pytest.mark.parametrize("at", [0, 100, 255])
def test_a_flipped_bit_is_found(folder: Path, at: int):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[at] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(
        ModelError, match=r"is damaged: model\.safetensors: expected SHA-256 .*copy the checkpoint"
    ):
        verify_checkpoint(folder)


def test_a_cut_or_missing_file_is_found(folder: Path):
    (folder / "model.safetensors").write_bytes(bytes(10))
    with pytest.raises(ModelError, match=r"expected 256 bytes, got 10"):
        verify_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: expected the file, got none"):
        verify_checkpoint(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"schema_version": 2}', '{"schema_version": 1, "files": {"a": {}}}', "\xff"],
)
def test_a_damaged_manifest_is_said(folder: Path, text: str):
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="cannot be verified: expected its rlhfspec-manifest"):
        verify_checkpoint(folder)


def test_a_checkpoint_without_manifest_cannot_be_verified(folder: Path):
    (folder / MANIFEST).unlink()
    with pytest.raises(ModelError, match="FileNotFoundError"):
        verify_checkpoint(folder)


def test_the_manifest_is_json_that_names_sizes(folder: Path):
    tree = json.loads((folder / MANIFEST).read_text())
    assert tree["files"]["sub/config.json"]["num_bytes"] == 2


@pytest.fixture
def state(folder: Path) -> Path:
    """The same as the state of a run."""
    path = folder / "checkpoints" / "state_0004"
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    write_manifest(path, model="state", weight_version=4, parameter_checksum="abc")
    return path


@pytest.mark.parametrize("damaged", ["state.json", MANIFEST])
def test_of_a_damaged_state_what_helps_is_said(state: Path, damaged: str):
    """Without its manifest it would be none: to delete that helps nobody."""
    (state / damaged).write_text("[")
    with pytest.raises(
        ModelError, match=r"^state .*put the state back from a copy of the run folder"
    ) as error:
        verify_checkpoint(state)
    assert "delete" not in str(error.value)


def test_states_are_found_newest_first_and_nothing_else(tmp_path: Path):
    assert state_folders(tmp_path / "none") == []
    for name in ("state_0002", "state_0010", "state_12345", "state_x", "target_0003", ".partial-state_0004"):
        (tmp_path / name).mkdir()
    (tmp_path / "state_0003").write_text("no folder")
    (tmp_path / "state_0005").symlink_to(tmp_path / "state_0002")
    assert [state_number(path) for path in state_folders(tmp_path)] == [12345, 10, 2]
    with pytest.raises(ValueError, match="expected a folder called state_NUMBER, got state_x"):
        state_number(tmp_path / "state_x")
