"""A record that cannot be written ends a run in turns at a boundary: the state of the last iteration is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from loop_hooks import before_updates

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.run.recorder import Recorder
from rlhfspec.core.checkpoint_manifest import state_folders
from rlhfspec.core.errors import StorageError
from tests.cluster.run.test_pipelined_run import tree
from tests.conftest import TinyPair

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_the_state_of_the_last_boundary_is_kept_where_the_record_of_a_phase_fails(
    local_ray: None, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    record, begun = Recorder.record, list[int]()

    def failing(self: Recorder, iteration: int, *what: Any) -> dict[str, float]:
        if iteration == 1:
            raise StorageError("cannot write moves.jsonl: it is a folder")
        return record(self, iteration, *what)

    monkeypatch.setattr(Recorder, "record", failing)
    before_updates(monkeypatch, lambda system: begun.append(system.target.manifest.weight_version))
    config = tree(tiny_pair, tmp_path)
    del config["rollout"]["max_staleness"], config["algorithm"]
    config["run"] |= {"iterations": 2, "state_every": 10, "checkpoint_every": 0}
    config["speculation"], config["cluster"]["generation"] = (
        {"drafter": "none", "policy": "off"},
        {"num_actors": 1},
    )
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["train", "--config", str(file)]) == 1
    said = capsys.readouterr()
    last = said.err.strip().splitlines()[-1]
    assert last.startswith(
        "error: cannot write moves.jsonl: it is a folder; 1 iterations are finished; go on with `rlhf"
    )
    assert "no iteration finished" not in said.out
    assert begun == [0], "the update of what was not recorded has not begun"
    (path,) = (tmp_path / "runs").iterdir()
    assert [folder.name for folder in state_folders(path / "checkpoints")] == ["state_0001"]
    monkeypatch.setattr(Recorder, "record", record)
    assert main(["train", "--resume", str(path)]) == 0
    assert begun == [0, 1] and "(weight version 2)" in capsys.readouterr().out
