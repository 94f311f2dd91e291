"""The meeting of heads that instances trained: who is lost is left out, who is worse is given up. Without Ray."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhfspec.actors.actor_messages import HeadComparison, HeadProgress
from rlhfspec.cluster.run import draft_step
from rlhfspec.cluster.run.draft_step import train_head
from rlhfspec.cluster.weights import first_weights
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.errors import InstanceLost, WaitTimeout
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.engine.drafters.head.published_head import pack_head, published_head
from rlhfspec.engine.weights.chunks import weight_views
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_llama import tiny_llama

LATE = WaitTimeout(waiter="the loop", waited_for="gen-1", order="hand over", waited_s=1.0, advice="wait")


@dataclass
class Remote:
    """A method that is called as an actor's: the answer is its reference."""

    answer: Callable[..., Any]

    def remote(self, *arguments: Any) -> Any:
        return self.answer(*arguments)


@dataclass
class Instance:
    """What an instance has learned, or why it does not answer."""

    moved_by: float = 0.0
    num_tokens: int = 0
    held_out: int = 0
    verdict: float = -1.0
    "loss of the tried head less that of the present one"
    fault: Exception | None = None
    failure: str = ""
    head: HeadWeights | None = None
    asked: list[str] = field(default_factory=list)
    tried: HeadWeights | None = None

    @property
    def take_head(self) -> Remote:
        def answer(timeout_s: float) -> tuple[Any, Any]:
            self.asked.append("take")
            if self.fault is not None:
                return self.fault, self.fault
            progress = HeadProgress(
                num_steps=self.num_tokens // 10,
                num_tokens=self.num_tokens,
                train_s=0.5,
                held_out_tokens=self.held_out,
                failure=self.failure,
            )
            assert self.head is not None
            moved = {name: (t + self.moved_by).numpy() for name, t in self.head.trained.items()}
            return progress, moved if self.num_tokens and not self.failure else {}

        return Remote(answer)

    @property
    def compare_head(self) -> Remote:
        def answer(timeout_s: float, manifest: Any, *chunks: np.ndarray) -> Any:
            self.asked.append("compare")
            self.tried = published_head(manifest, weight_views(manifest, chunks))
            if self.verdict == math.inf:
                return InstanceLost("died while it compared")
            return HeadComparison(present=2.0, tried=2.0 + self.verdict, num_tokens=self.held_out)

        return Remote(answer)

    @property
    def give_up_head(self) -> Remote:
        return Remote(lambda timeout_s: self.asked.append("give up"))

    @property
    def train_on_head(self) -> Remote:
        return Remote(lambda timeout_s: self.asked.append("train on"))


def answered(ref: Any, **_: Any) -> Any:
    """As `actors.remote.waiting.get`: what is an error is raised."""
    for one in ref if isinstance(ref, list) else [ref]:
        if isinstance(one, Exception):
            raise one
    return ref


@pytest.fixture
def head() -> HeadWeights:
    return random_head(tiny_llama(), draft_vocab_size=7)


@pytest.fixture
def step(head: HeadWeights, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let instances meet; the system afterwards, with figures and notes."""
    monkeypatch.setattr(draft_step, "get", answered)
    monkeypatch.setattr(first_weights.ray, "put", lambda chunk: chunk)
    monkeypatch.setattr(draft_step.ray, "wait", lambda refs, **_: (refs, []))

    def meet(iteration_s: float = 100.0, overhead_s: float = 0.0, **instances: Instance) -> Any:
        manifest, chunks = pack_head(head, weight_version=4)
        for one in instances.values():
            one.head = head
        published: list[PublishedWeights] = []
        system: Any = SimpleNamespace(
            config=SimpleNamespace(
                cluster=SimpleNamespace(order_timeout_s=5.0),
                drafter_training=SimpleNamespace(budget_share=0.05),
            ),
            draft=PublishedWeights(manifest=manifest, chunk_refs=tuple(chunks)),
            generation=SimpleNamespace(instances=instances, publish=published.append),
            refit_overhead_s=overhead_s,
            noted_faults=set(),
        )
        notes: list[str] = []
        report: Any = SimpleNamespace(note=notes.append)
        system.metrics = train_head(system, iteration_s=iteration_s, report=report)
        system.published, system.notes = published, notes
        return system

    return meet


def draft_of(system: Any) -> HeadWeights:
    manifest = system.draft.manifest
    return published_head(manifest, weight_views(manifest, system.draft.chunk_refs))


def test_the_mean_of_what_instances_learned_is_published_to_all(step, head: HeadWeights) -> None:
    two = {
        "gen_0": Instance(moved_by=1.0, num_tokens=300, held_out=5),
        "gen_1": Instance(moved_by=-3.0, num_tokens=100, held_out=9),
        "gen_2": Instance(),
    }
    system = step(**two)
    assert [one.manifest.weight_version for one in system.published] == [5]
    torch.testing.assert_close(draft_of(system).tensors["fc.weight"], head.tensors["fc.weight"])
    assert two["gen_1"].asked == ["take", "compare"], "it has held out most"
    assert two["gen_0"].asked == ["take"]
    metrics = system.metrics
    assert (metrics["draft/spot_instances"], metrics["draft/spot_tokens"]) == (2.0, 400.0)
    assert (metrics["draft/spot_steps"], metrics["draft/spot_s"]) == (40.0, 1.5)
    assert (metrics["draft/kl_before"], metrics["draft/kl_after"], metrics["draft/refit_taken"]) == (
        2.0,
        1.0,
        1.0,
    )
    assert system.refit_overhead_s > 0.0 and system.notes == []


@pytest.mark.parametrize("fault", [InstanceLost("gen_1 died"), LATE])
def test_one_instance_lost_the_others_stand(step, head: HeadWeights, fault: Exception) -> None:
    learned = Instance(moved_by=1.0, num_tokens=10, held_out=4)
    system = step(gen_0=learned, gen_1=Instance(num_tokens=90, fault=fault))
    torch.testing.assert_close(draft_of(system).tensors["fc.weight"], head.tensors["fc.weight"] + 1.0)
    assert system.metrics["draft/spot_tokens"] == 10.0
    assert len(system.notes) == 1 and "gen_1 learned of the draft head is left out" in system.notes[0]


@pytest.mark.parametrize("verdict", [0.1, math.nan])
def test_a_head_that_is_worse_is_given_up_by_all(step, head: HeadWeights, verdict: float) -> None:
    both = {
        name: Instance(moved_by=1.0, num_tokens=10, held_out=4, verdict=verdict)
        for name in ("gen_0", "gen_1")
    }
    system = step(**both)
    assert system.published == [] and system.draft.manifest.weight_version == 4
    assert all(one.asked[-1] == "give up" for one in both.values())
    assert system.metrics["draft/refit_taken"] == 0.0 and "draft/kl_before" in system.metrics


@pytest.mark.parametrize("verdict", [-1.0, 0.1])
def test_a_meeting_sets_its_seconds_aside_whatever_comes_of_it(
    step, monkeypatch: pytest.MonkeyPatch, verdict: float
) -> None:
    seconds = iter([100.0, 103.0])
    monkeypatch.setattr(draft_step.time, "perf_counter", lambda: next(seconds))
    system = step(overhead_s=4.0, gen_0=Instance(moved_by=1.0, num_tokens=10, held_out=4, verdict=verdict))
    assert system.refit_overhead_s == 3.0


def test_a_meeting_without_anything_learned_leaves_what_is_set_aside(step) -> None:
    assert step(overhead_s=4.0, gen_0=Instance()).refit_overhead_s == 4.0


def test_where_the_comparing_instance_dies_the_next_one_compares(step) -> None:
    lost = Instance(moved_by=1.0, num_tokens=10, held_out=40, verdict=math.inf)
    other = Instance(num_tokens=10, held_out=2)
    system = step(gen_0=lost, gen_1=other)
    assert other.asked == ["take", "compare"] and system.draft.manifest.weight_version == 5
    assert "gen_0 could not compare draft heads: died while it compared" in system.notes[0]


def test_what_nobody_could_compare_is_not_published_and_instances_train_on(step) -> None:
    one = Instance(moved_by=1.0, num_tokens=10)
    system = step(gen_0=one)
    assert one.asked == ["take", "train on"] and system.published == []
    assert system.draft.manifest.weight_version == 4 and system.metrics["draft/refit_taken"] == 0.0
    assert "draft/kl_before" not in system.metrics
    assert len(system.notes) == 1 and "none has a sequence held out" in system.notes[0]


def test_an_instance_whose_training_has_ended_is_told_once_and_left_out(step) -> None:
    system = step(gen_0=Instance(num_tokens=10, failure="ValueError: odd"), gen_1=Instance())
    assert (
        system.published == [] and "gen_0 trains the draft head no more: ValueError: odd" in system.notes[0]
    )


def test_heads_meet_only_as_often_as_the_budget_has_room(step) -> None:
    one = Instance(moved_by=1.0, num_tokens=10)
    system = step(iteration_s=10.0, overhead_s=0.6, gen_0=one)
    assert one.asked == [] and system.published == []
    assert system.refit_overhead_s == pytest.approx(0.54), "what is set aside shrinks until it fits"
