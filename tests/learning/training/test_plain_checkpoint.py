"""A trainer's state is read from disk without running what its files name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from small_learner_state import small_learner_state

from rlhfspec.core.errors import ConfigError


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    small_learner_state(7).save(tmp_path / "saved")
    return tmp_path / "saved"


def test_what_was_saved_is_read_again(saved: Path) -> None:
    again = small_learner_state()
    with torch.no_grad():
        again.model.weight.zero_()
    again.load(saved)
    assert again.num_optimizer_steps == 7 and torch.equal(
        again.model.weight, small_learner_state().model.weight
    )


def test_a_table_that_names_code_is_refused_and_runs_nothing(saved: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (saved / ".metadata").write_bytes(pickle.dumps(Touch(touched)))
    with pytest.raises(ConfigError, match=r"is damaged: \.metadata is no table of a checkpoint \(it names "):
        small_learner_state().load(saved)
    assert not touched.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps([])[:-1]])
def test_a_damaged_table_is_named(saved: Path, content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        small_learner_state().load(saved)


def test_a_number_that_names_code_is_refused_and_runs_nothing(saved: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    plant(saved, 0.5)
    small_learner_state().load(saved)
    plant(saved, Touch(touched))
    with pytest.raises(ConfigError, match="does not fit this trainer"):
        small_learner_state().load(saved)
    assert not touched.exists()


def plant(saved: Path, value: object) -> None:
    """Let the table's learning rate be found in another file."""
    table = pickle.loads((saved / ".metadata").read_bytes())
    place = next(key for key in table.storage_data if key.fqn.endswith(".lr"))
    torch.save(value, saved / "planted.distcp")
    info = table.storage_data[place]
    info.relative_path, info.offset = "planted.distcp", 0
    info.length = (saved / "planted.distcp").stat().st_size
    (saved / ".metadata").write_bytes(pickle.dumps(table))
