"""What the node's metrics port says of an instance, without Ray: the metrics are a notebook."""

from __future__ import annotations

from collections import defaultdict

import pytest

import actors.generation.gauges
from actors.generation.gauges import REFRESH_S, InstanceGauges
from core.decode_records import GenerationStats, InstanceLoad


class Notebook:
    """Stands for Ray's metrics: the last value of every gauge, the sum of every counter."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)
        self.now_s = 1000.0

    def metric(self, name: str, **_described: object) -> Metric:
        return Metric(self, name)


class Metric:
    def __init__(self, notebook: Notebook, name: str) -> None:
        self._notebook = notebook
        self._name = name.removeprefix("rlhfspec_")

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags == {"instance": "rollout-0"}

    def set(self, value: float) -> None:
        self._notebook.values[self._name] = value

    def inc(self, value: float) -> None:
        assert value > 0
        self._notebook.values[self._name] += value


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    notebook = Notebook()
    monkeypatch.setattr(actors.generation.gauges, "Gauge", notebook.metric)
    monkeypatch.setattr(actors.generation.gauges, "Counter", notebook.metric)
    return notebook


def load(num_running: int, *, num_emitted_tokens: int, move_s: float = 0.0) -> InstanceLoad:
    return InstanceLoad(
        instance="rollout-0",
        num_running=num_running,
        num_waiting=2,
        num_free_slots=1,
        context_tokens=50,
        weight_version=3,
        drafter_version=0,
        decode_step=7,
        goodput_tokens_per_s=12.5,
        stats=GenerationStats(num_emitted_tokens=num_emitted_tokens, move_s=move_s),
    )


def test_gauges_are_refreshed_at_most_once_an_interval_while_samples_run(notebook: Notebook) -> None:
    gauges = InstanceGauges("rollout-0", clock=lambda: notebook.now_s)
    gauges.update(load(4, num_emitted_tokens=10))
    assert notebook.values["running_samples"] == 4.0 and notebook.values["emitted_tokens"] == 10.0
    notebook.now_s += 0.9 * REFRESH_S
    gauges.update(load(3, num_emitted_tokens=30, move_s=0.25))
    assert notebook.values["running_samples"] == 4.0 and notebook.values["emitted_tokens"] == 10.0
    notebook.now_s += 0.2 * REFRESH_S
    gauges.update(load(2, num_emitted_tokens=60, move_s=0.5))
    # what was left out in between is counted now, once
    assert notebook.values["running_samples"] == 2.0 and notebook.values["emitted_tokens"] == 60.0
    assert notebook.values["move_seconds"] == 0.5


def test_gauges_are_updated_at_once_when_an_instance_becomes_idle(notebook: Notebook) -> None:
    gauges = InstanceGauges("rollout-0", clock=lambda: notebook.now_s)
    gauges.update(load(4, num_emitted_tokens=10))
    gauges.update(load(0, num_emitted_tokens=11))
    assert notebook.values["running_samples"] == 0.0 and notebook.values["emitted_tokens"] == 11.0


def test_gauges_are_zero_after_an_instance_has_stopped(notebook: Notebook) -> None:
    gauges = InstanceGauges("rollout-0", clock=lambda: notebook.now_s)
    gauges.update(load(4, num_emitted_tokens=10))
    assert notebook.values["waiting_samples"] == 2.0 and notebook.values["weight_version"] == 3.0
    gauges.close()
    assert {name for name, value in notebook.values.items() if value} == {"emitted_tokens"}
