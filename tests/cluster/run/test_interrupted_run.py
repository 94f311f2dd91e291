"""Ctrl-C: between updates it ends the run with a state, while trainers learn it waits for the iteration's end."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.run import lifetime
from rlhfspec.cluster.run.lifetime import ending_well, interrupts_between_updates
from rlhfspec.core.errors import NodeDied


def a_run(*, is_learning: bool, finished: int | None = 2) -> Any:
    saved: list[Any] = []
    nothing = SimpleNamespace(write_timeline=lambda: None, close=lambda: None)
    return SimpleNamespace(
        system=SimpleNamespace(is_learning=is_learning, trainers=SimpleNamespace(meanwhile=1)),
        boundary=None if finished is None else SimpleNamespace(num_iterations=finished),
        states=SimpleNamespace(save=saved.append),
        report=SimpleNamespace(note=lambda text: None),
        recorder=nothing,
        log=nothing,
        is_interrupted=False,
        saved=saved,
    )


def test_between_updates_it_ends_the_run_and_keeps_the_state() -> None:
    for finished, states in ((2, 1), (0, 0), (None, 0)):
        run = a_run(is_learning=False, finished=finished)
        with pytest.raises(KeyboardInterrupt), ending_well(run), interrupts_between_updates(run):
            signal.raise_signal(signal.SIGINT)
        assert len(run.saved) == states


def test_while_trainers_learn_it_waits_and_the_second_does_not() -> None:
    before, run = signal.getsignal(signal.SIGINT), a_run(is_learning=True)
    with pytest.raises(KeyboardInterrupt), ending_well(run), interrupts_between_updates(run):
        signal.raise_signal(signal.SIGINT)
        assert run.is_interrupted
        signal.raise_signal(signal.SIGINT)
    # trainers may be beyond the last boundary
    assert not run.saved and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("states", [(), (1,)])
def test_where_the_node_died_is_said_what_there_is_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: tuple[int, ...]
) -> None:
    """Its object store went with it: weights that no state has are lost."""
    run, run_dir = a_run(is_learning=True), RunDir(path=tmp_path)
    run.run_dir, run.stream = run_dir, SimpleNamespace(failure=None)
    run.system.target = SimpleNamespace(manifest=SimpleNamespace(weight_version=2))
    for number in states:
        run_dir.checkpoint_dir("state", number).mkdir(parents=True)
    died = NodeDied("the Ray node under this process died")

    def gone(*_: object, **__: object) -> None:
        raise died

    monkeypatch.setattr(lifetime, "save_checkpoints", gone)
    with pytest.raises(NodeDied) as caught, ending_well(run):
        raise died
    (note,) = caught.value.__notes__
    assert note.endswith(run_dir.goes_on()) and ("--resume" in note) == bool(states)
    assert ("start it anew" in note) == (not states)
