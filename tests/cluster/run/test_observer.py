"""What the loop's observer says at each look. No Ray: the metrics are a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlhfspec.actors.remote import run_metrics
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.live_page import InstanceRow
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.observer import Observer, set_gauges
from rlhfspec.core.config import Config
from rlhfspec.core.metrics import Exported


class Notebook(dict[str, float]):
    """Stands for Ray's metrics: the last value of each gauge."""

    def __init__(self) -> None:
        self.labelled: dict[tuple[str, str], float] = {}

    def record(self, metric: Exported, value: float, labels: dict[str, str]) -> None:
        if metric.kind == "gauge":
            self[metric.name] = value
            self.labelled[metric.name, labels.get("actor", "")] = value


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    run_metrics.begin(notebook)
    yield notebook
    run_metrics.begin(None)


@pytest.fixture
def observer(tmp_path: Path) -> Observer:
    tree = {
        "run": {"output_dir": str(tmp_path / "runs")},
        "data": {"task": "chain"},
        "speculation": {"drafter": "none"},
    }
    run_dir = RunDir.create(Config.model_validate(tree))
    session = RaySession(namespace="rlhfspec-demo-0", is_local=False, dashboard_url=None)
    return Observer(run_dir, session, num_iterations=5, clock=lambda: 1000.0)


def test_metrics_of_the_last_iteration_are_set_at_each_look(observer: Observer, notebook: Notebook) -> None:
    observer.iteration(0, {"reward/mean": 0.5, "time/update_s": 3.0})
    observer.iteration(1, {"reward/mean": 0.75})
    for _ in range(2):
        # Ray has forgotten what was set last
        notebook.clear()
        observer.look()
        assert notebook["reward_mean"] == 0.75 and notebook["iteration"] == 2.0
        assert "time_update_seconds" not in notebook, "of an iteration before"


def test_the_last_look_says_that_the_run_has_ended_and_when(observer: Observer, notebook: Notebook) -> None:
    observer.look()
    assert (notebook["run_up"], notebook["end_timestamp_seconds"], notebook["run_outlived"]) == (
        1.0,
        0.0,
        1.0,
    )
    observer.close()
    assert (notebook["run_up"], notebook["end_timestamp_seconds"]) == (0.0, 1000.0)


@pytest.mark.parametrize("gone_first", [True, False])
def test_an_instance_that_is_gone_hides_no_living_one_of_its_label(
    observer: Observer, notebook: Notebook, gone_first: bool
) -> None:
    states = {"gen-64": "gone", "gen-0": "serving", "gen-1": "gone", "gen-2": "serving", "gen-66": "serving"}
    rows = [InstanceRow(name=name, state=state, num_slots=4) for name, state in states.items()]
    page = replace(observer.look(), instances=tuple(rows if gone_first else rows[::-1]))
    for told, expected in (page, (1.0, 0.0, 2.0)), (replace(page, ended=True), (0.0, 0.0, 0.0)):
        set_gauges(told, outlived=True)
        serving = [notebook.labelled["instance_serving", f"gen-{number}"] for number in range(3)]
        assert tuple(serving) == expected
