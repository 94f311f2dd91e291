"""The loop's side of a drafter that follows the target: how many seconds that may take, and what is published of it.

A draft model is refit by the trainer. The share of the budget is taken of the seconds that this iteration has used up
to here. What packing and publishing took last time is set aside first, so the whole stays within the share. Where that
alone is more than the share, refits come only every few iterations: what is set aside shrinks while nothing is
published.

A draft head is trained by instances in idle time (`actors.generation.spot_trainer`). What they learned is collected,
averaged, compared with the present head on what one of them has held out, and published where it is no worse; what
nobody could compare is not published, and instances train on. All of it together stays within the same share: where it
would not, instances train on and their heads meet in a later iteration.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayTaskError

from ...actors.actor_messages import HeadComparison, HeadProgress
from ...actors.remote.deaths import last_line
from ...actors.remote.remote import Handle
from ...actors.remote.waiting import awake_s, get
from ...core.errors import NodeDied, RlhfSpecError, WeightsError
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.drafters.head.published_head import published_head
from ...engine.weights.chunks import weight_views
from ...learning.drafts.draft_learner import RefitReport
from ...learning.drafts.head_average import HeadAverage
from ...learning.drafts.held_out import is_no_worse
from ..observe.console import Reporter
from ..system.system import System
from ..weights.first_weights import put_head
from ..weights.publish import PublishedWeights

FORGET = 0.9
"What is left of the seconds set aside after an iteration without a publication, or without time for a meeting."


def refit_draft(system: System, rollouts: Any, *, iteration_s: float, report: Reporter) -> dict[str, float]:
    """Refit the draft model and publish it where new weights were taken; return the metrics.

    A refit that ends in what is not finite is given up: the former draft model stays, and a note says so.

    Args:
        system: its `draft` becomes the new version.
        rollouts: reference to the iteration's rollouts.
        iteration_s: seconds the iteration has taken so far.
        report: gets the note.
    """
    config = system.config
    if config.trains_head:
        return train_head(system, iteration_s=iteration_s, report=report)
    if system.draft is None or not config.refits_draft:
        return {}
    began_s = time.perf_counter()
    budget_s = config.drafter_training.budget_share * iteration_s - system.refit_overhead_s
    refit = system.trainers.refit(rollouts, budget_s)
    if refit.outcome == "not_finite":
        report.note(
            "the refit of the draft model gave what is not finite and was given up; version "
            f"{refit.weight_version} stays, and the next refit learns at half the rate; seen often, "
            "lower drafter_training.learning_rate"
        )
    if refit.outcome == "taken":
        system.draft = system.trainers.take("draft")
        system.generation.publish(system.draft)
        system.refit_overhead_s = time.perf_counter() - began_s - refit.refit_s
    else:
        system.refit_overhead_s *= FORGET
    return refit_metrics(refit)


def refit_metrics(report: RefitReport) -> dict[str, float]:
    """The report as metrics; a divergence that was not computed is left out."""
    metrics = {
        "draft/weight_version": float(report.weight_version),
        "draft/refit_taken": float(report.outcome == "taken"),
        "draft/refit_steps": float(report.num_steps),
        "draft/refit_tokens": float(report.num_tokens),
        "draft/learn_s": report.refit_s,
    }
    for name, value in (("kl_before", report.kl_before), ("kl_after", report.kl_after)):
        if value is not None:
            metrics[f"draft/{name}"] = value
    return metrics


Outcome = Literal["taken", "worse", "nothing", "no_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStep:
    """What became of one iteration's training."""

    outcome: Outcome
    weight_version: int
    num_trained: int = 0
    "instances that had learned something"
    num_steps: int = 0
    num_tokens: int = 0
    train_s: float = 0.0
    present: float = math.nan
    tried: float = math.nan

    def metrics(self) -> dict[str, float]:
        """As metrics; what was not computed is left out."""
        metrics = {
            "draft/weight_version": float(self.weight_version),
            "draft/refit_taken": float(self.outcome == "taken"),
            "draft/spot_instances": float(self.num_trained),
            "draft/spot_steps": float(self.num_steps),
            "draft/spot_tokens": float(self.num_tokens),
            "draft/spot_s": self.train_s,
        }
        losses = {"draft/kl_before": self.present, "draft/kl_after": self.tried}
        return metrics | {name: loss for name, loss in losses.items() if math.isfinite(loss)}


def train_head(system: System, *, iteration_s: float, report: Reporter) -> dict[str, float]:
    """Publish what instances have learned, where it is no worse; return the metrics.

    An instance that is lost, or does not answer in time, is left out: what the others learned stands.

    Args:
        system: its `draft` becomes the new version.
        iteration_s: seconds the iteration has taken so far.
        report: gets notes, each once.
    """
    draft = system.draft
    assert draft is not None
    began_s = time.perf_counter()
    if system.refit_overhead_s > system.config.drafter_training.budget_share * iteration_s:
        system.refit_overhead_s *= FORGET
        return HeadStep(outcome="no_time", weight_version=draft.manifest.weight_version).metrics()
    step = _Step(system, report)
    done = step.take()
    seconds = time.perf_counter() - began_s
    # collecting and comparing cost what they cost, whatever comes of them; where nobody had learned anything, a meeting
    # that has something to collect costs as much as before, or more
    system.refit_overhead_s = seconds if done.num_trained else max(seconds, system.refit_overhead_s)
    return done.metrics()


class _Step:
    """One meeting of the heads."""

    def __init__(self, system: System, report: Reporter) -> None:
        assert system.draft is not None
        self._system, self._report, self._draft = system, report, system.draft
        self._instances: Mapping[str, Handle] = dict(sorted(system.generation.instances.items()))
        self._timeout_s = system.config.cluster.order_timeout_s

    def take(self) -> HeadStep:
        """Collect, average, compare, publish."""
        reports: dict[str, HeadProgress] = {}
        average = HeadAverage(self._present())
        for name, progress, tensors in self._collected():
            reports[name] = progress
            if progress.failure:
                self._say(f"{name} trains the draft head no more: {progress.failure}")
            try:
                average.add(name, tensors, num_tokens=progress.num_tokens if tensors else 0)
            except WeightsError as error:
                self._say(str(error))
        learned = average.result()
        version = self._draft.manifest.weight_version
        nothing = HeadStep(
            outcome="nothing",
            weight_version=version,
            num_trained=sum(one.num_tokens > 0 for one in reports.values()),
            num_steps=sum(one.num_steps for one in reports.values()),
            num_tokens=sum(one.num_tokens for one in reports.values()),
            train_s=sum(one.train_s for one in reports.values()),
        )
        if learned is None:
            return nothing
        tried = put_head(learned, weight_version=version + 1)
        found = self._compared(tried, reports)
        if not found.num_tokens:
            self._say(
                "what instances learned of the draft head is not published yet: none has a sequence held out to "
                "compare heads on; they train on"
            )
            self._order("train_on_head")
            return nothing
        compared = replace(nothing, present=found.present, tried=found.tried)
        if not is_no_worse(found.tried, found.present):
            # NaN is worse, too
            self._order("give_up_head")
            return replace(compared, outcome="worse")
        self._system.draft = tried
        self._system.generation.publish(tried)
        return replace(compared, outcome="taken", weight_version=version + 1)

    def _present(self) -> HeadWeights:
        manifest = self._draft.manifest
        chunks = self._answer(
            list(self._draft.refs()), "the object store", "fetch the draft head", self._timeout_s
        )
        return published_head(manifest, weight_views(manifest, chunks))

    def _collected(self) -> Iterator[tuple[str, HeadProgress, dict[str, np.ndarray]]]:
        refs = {name: one.take_head.remote(self._timeout_s) for name, one in self._instances.items()}
        ends_s = awake_s() + self._timeout_s
        for name, (report, tensors) in refs.items():
            try:
                left_s = max(0.0, ends_s - awake_s())
                progress, arrays = self._answer([report, tensors], name, "hand over its draft head", left_s)
            except NodeDied:
                raise
            except (RlhfSpecError, RayTaskError) as error:
                self._say(f"what {name} learned of the draft head is left out: {last_line(error)}")
            else:
                yield name, progress, arrays

    def _compared(self, tried: PublishedWeights, reports: Mapping[str, HeadProgress]) -> HeadComparison:
        """By the instance that has held out most; by the next one where it is lost. Nothing held out: no numbers."""
        by_size = sorted(reports, key=lambda name: (-reports[name].held_out_tokens, name))
        for name in by_size:
            if not reports[name].held_out_tokens or reports[name].failure:
                continue
            ref = self._instances[name].compare_head.remote(
                self._timeout_s, tried.manifest, *tried.chunk_refs
            )
            try:
                return self._answer(ref, name, "compare draft heads", self._timeout_s)
            except NodeDied:
                raise
            except (RlhfSpecError, RayTaskError) as error:
                self._say(f"{name} could not compare draft heads: {last_line(error)}")
        return HeadComparison(present=math.nan, tried=math.nan, num_tokens=0)

    def _order(self, outcome: str) -> None:
        """Let all know what became of their heads; who cannot be told is found when it is asked next."""
        refs = [getattr(one, outcome).remote(self._timeout_s) for one in self._instances.values()]
        ray.wait(refs, num_returns=len(refs), timeout=self._timeout_s)

    def _answer(self, ref: Any, who: str, order: str, timeout_s: float) -> Any:
        return get(ref, waiter="the loop", waited_for=who, order=order, timeout_s=timeout_s)

    def _say(self, text: str) -> None:
        if text not in self._system.noted_faults:
            self._system.noted_faults.add(text)
            self._report.note(text)
