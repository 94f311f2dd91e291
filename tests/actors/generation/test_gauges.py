"""What the node's metrics port says of an instance, without Ray: the metrics are a notebook."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

from rlhfspec.actors.generation.gauges import REFRESH_S, REPEAT_S, InstanceGauges
from rlhfspec.actors.remote import run_metrics
from rlhfspec.core.decode_records import GenerationStats, InstanceLoad
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.metrics import Exported


class Notebook:
    """Stands for Ray's metrics: the last value of every gauge, the sum of every counter."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)
        self.now_s = 1000.0

    def record(self, metric: Exported, value: float, labels: dict[str, str]) -> None:
        assert labels == {"actor": "rollout-0"}
        before = self.values[metric.name] if metric.kind == "counter" else 0.0
        self.values[metric.name] = before + value


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    run_metrics.begin(notebook)
    yield notebook
    run_metrics.begin(None)


def load(
    num_running: int, *, num_emitted_tokens: int, move_s: float = 0.0, num_sample_steps: int = 0
) -> InstanceLoad:
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
        stats=GenerationStats(
            num_emitted_tokens=num_emitted_tokens, move_s=move_s, num_sample_steps=num_sample_steps
        ),
    )


def test_gauges_are_refreshed_at_most_once_an_interval_while_samples_run(notebook: Notebook) -> None:
    gauges = InstanceGauges("rollout-0", clock=lambda: notebook.now_s)
    gauges.update(load(4, num_emitted_tokens=10))
    assert notebook.values["instance_running_samples"] == 4.0 and notebook.values["emitted_tokens"] == 10.0
    notebook.now_s += 0.9 * REFRESH_S
    gauges.update(load(3, num_emitted_tokens=30, move_s=0.25))
    assert notebook.values["instance_running_samples"] == 4.0 and notebook.values["emitted_tokens"] == 10.0
    notebook.now_s += 0.2 * REFRESH_S
    gauges.update(load(2, num_emitted_tokens=60, move_s=0.5))
    # what was left out in between is counted now, once
    assert notebook.values["instance_running_samples"] == 2.0 and notebook.values["emitted_tokens"] == 60.0
    assert notebook.values["move_seconds"] == 0.5


def test_the_acceptance_gauge_forgets_what_was_before_the_last_refresh(notebook: Notebook) -> None:
    gauges = InstanceGauges("rollout-0", clock=lambda: notebook.now_s)
    gauges.update(load(4, num_emitted_tokens=40, num_sample_steps=10))
    notebook.now_s += 2 * REFRESH_S
    gauges.update(load(4, num_emitted_tokens=60, num_sample_steps=20))
    assert notebook.values["instance_acceptance_length_tokens"] == 2.0


def test_an_instance_that_becomes_idle_says_so_at_once_and_has_no_goodput(notebook: Notebook) -> None:
    gauges = InstanceGauges("rollout-0", clock=lambda: notebook.now_s)
    gauges.update(load(4, num_emitted_tokens=10))
    assert notebook.values["instance_goodput_tokens_per_second"] == 12.5
    gauges.update(load(0, num_emitted_tokens=11))
    assert notebook.values["instance_running_samples"] == 0.0 and notebook.values["emitted_tokens"] == 11.0
    assert notebook.values["instance_goodput_tokens_per_second"] == 0.0


def test_gauges_are_zero_after_an_instance_has_stopped(notebook: Notebook) -> None:
    gauges = InstanceGauges("rollout-0", clock=lambda: notebook.now_s)
    gauges.update(load(4, num_emitted_tokens=10))
    assert notebook.values["instance_waiting_samples"] == 2.0
    gauges.close()
    assert {name for name, value in notebook.values.items() if value} == {"emitted_tokens"}


def test_an_idle_instance_says_the_same_again_before_ray_forgets_it(notebook: Notebook) -> None:
    gauges = InstanceGauges("rollout-0", clock=lambda: notebook.now_s)
    gauges.update(load(0, num_emitted_tokens=10))
    notebook.values.clear()
    notebook.now_s += 0.9 * REPEAT_S
    gauges.repeat()
    assert not notebook.values
    notebook.now_s += 0.2 * REPEAT_S
    gauges.repeat()
    assert notebook.values["instance_weight_version"] == 3.0 and "emitted_tokens" not in notebook.values
    gauges.close()
    notebook.now_s += 2 * REPEAT_S
    gauges.repeat()
    assert not any(notebook.values.values()), "it has stopped"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: run_metrics.set_value("made_up", 1.0),
        lambda: run_metrics.add("iteration"),
        lambda: run_metrics.set_value("instance_serving", 1.0),
        lambda: run_metrics.set_metrics({"reward/mean": 1.0, "made/up": 1.0}),
    ],
)
def test_what_is_not_declared_cannot_be_exported_even_outside_of_a_run(wrong) -> None:
    with pytest.raises(RlhfSpecError, match="not declared"):
        wrong()
