"""Instances that start in the background: each waits for its place, builds, loads the current weights, and joins.

Everything is ordered at once and only looked at later, so nobody waits for a joiner: Ray starts the actor when its
bundle is there, and its mailbox holds the weights. A version published meanwhile is sent after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from actors.actor_messages import GenerationSpec, InstanceNumerics, LoadedWeights
from actors.ray_utils.remote import Handle
from actors.ray_utils.waiting import get
from cluster.placement.single_places import SinglePlaces, is_placed
from cluster.placement.topology import Place
from cluster.weights.publish import PublishedWeights, confirm
from core.errors import InstanceLost, RlhfSpecError, WaitTimeout

SAID_AFTER_S = 20.0
"Without a place for so long, what is missing is said; the wish stays open, since nodes may still come."


@dataclass(slots=True, kw_only=True)
class Joiner:
    """One instance on its way."""

    name: str
    place: Place
    group: PlacementGroup | None
    "its own bundle; None: one of the run's first places"
    spec: GenerationSpec
    handle: Handle
    sentinel: Any
    began_s: float
    placed_s: float | None = None
    loads: dict[str, tuple[PublishedWeights, Any]] = field(default_factory=dict)
    "by model: the version that was sent last, and the answer to come"
    words: list[Any] = field(default_factory=list)
    "answers to come: its numerics, its node"
    is_said: bool = False

    @property
    def started_s(self) -> float:
        """Seconds since it was decided on."""
        return time.monotonic() - self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A joiner that holds the current weights."""

    joiner: Joiner
    numerics: InstanceNumerics
    node: str


class Joiners:
    """Those of one pool."""

    def __init__(self, places: SinglePlaces, note: Callable[[str], None], *, start_timeout_s: float) -> None:
        self._places, self._note, self._start_timeout_s = places, note, start_timeout_s
        self._coming: list[Joiner] = []

    def __len__(self) -> int:
        return len(self._coming)

    def add(self, joiner: Joiner) -> None:
        """Look after an instance whose actor has been ordered."""
        self._coming.append(joiner)

    def cancel(self, count: int) -> list[str]:
        """Give up so many, the youngest first, and only those without a place."""
        without = [one for one in reversed(self._coming) if one.placed_s is None and one.group is not None][
            :count
        ]
        for one in without:
            self._drop(one)
        return [one.name for one in without]

    def cancel_all(self) -> None:
        """Give up whatever is on its way."""
        for one in list(self._coming):
            self._drop(one)

    def look(
        self, weights: Mapping[str, PublishedWeights], *, may_fetch: bool, num_there: int
    ) -> tuple[list[Ready], list[tuple[Joiner, str]]]:
        """Send versions that are new, and take those in that hold all of them.

        Args:
            weights: the current version of each model.
            may_fetch: whether the trainer can be asked for what was broadcast.
            num_there: instances that the run goes on with, for what is said.

        Returns:
            those that are ready, and those that failed with the reason.
        """
        ready: list[Ready] = []
        failed: list[tuple[Joiner, str]] = []
        for one in list(self._coming):
            try:
                found = self._look_at(one, weights, may_fetch=may_fetch, num_there=num_there)
            except RlhfSpecError as error:
                self._drop(one)
                failed.append((one, str(error)))
            else:
                if found is not None:
                    self._coming.remove(one)
                    ready.append(found)
        return ready, failed

    def _look_at(
        self, one: Joiner, weights: Mapping[str, PublishedWeights], *, may_fetch: bool, num_there: int
    ) -> Ready | None:
        if one.placed_s is None and not self._has_place(one, num_there):
            return None
        assert one.placed_s is not None
        self._send(one, weights, may_fetch=may_fetch)
        refs = [ref for _, ref in one.loads.values()] + one.words
        if len(one.loads) < len(one.spec.model_names) or _num_ready(refs) < len(refs):
            self._require_on_its_way(one, time.monotonic() - one.placed_s)
            return None
        for model, (sent, ref) in one.loads.items():
            loaded: LoadedWeights = self._answer(
                one, ref, f"load {model} version {sent.manifest.weight_version}"
            )
            confirm(loaded, sent.manifest)
        if any(one.loads[model][0] is not weights[model] for model in one.spec.model_names):
            return None
        if not one.words:
            # of an engine that is built
            one.words = [one.handle.numerics.remote(), one.handle.node.remote()]
            return None
        numerics, node = (self._answer(one, ref, "say what it is") for ref in one.words)
        return Ready(joiner=one, numerics=numerics, node=node)

    def _has_place(self, one: Joiner, num_there: int) -> bool:
        if one.group is None or is_placed(one.group):
            one.placed_s = time.monotonic()
            return True
        if not one.is_said and one.started_s > SAID_AFTER_S:
            one.is_said = True
            self._note(
                f"{self._places.explain(one.place, waited_s=one.started_s)}; the run goes on with {num_there} "
                "instances, and it joins when there is room"
            )
        return False

    def _send(self, one: Joiner, weights: Mapping[str, PublishedWeights], *, may_fetch: bool) -> None:
        for model in one.spec.model_names:
            current = weights[model]
            if model in one.loads and one.loads[model][0] is current:
                continue
            if current.fetch is not None and not may_fetch:
                continue
            chunks = current.refs()
            ref = one.handle.load_weights.remote(self._start_timeout_s, current.manifest, *chunks)
            one.loads[model] = (current, ref)

    def _require_on_its_way(self, one: Joiner, waited_s: float) -> None:
        """Raise what ended its loop, or WaitTimeout."""
        if waited_s > self._start_timeout_s:
            raise WaitTimeout(
                waiter="the loop",
                waited_for=one.name,
                order="start and load the weights",
                waited_s=waited_s,
                advice="look at its log in the Ray dashboard, or raise cluster.start_timeout_s",
            )
        if ray.wait([one.sentinel], timeout=0)[0]:
            self._answer(one, one.sentinel, "decode")
            raise InstanceLost(f"{one.name} left its loop before it had joined")

    def _answer(self, one: Joiner, ref: Any, order: str) -> Any:
        return get(ref, waiter="the loop", waited_for=one.name, order=order, timeout_s=self._start_timeout_s)

    def _drop(self, one: Joiner) -> None:
        self._coming.remove(one)
        ray.kill(one.handle)
        if one.group is not None:
            self._places.free(one.group)


def _num_ready(refs: list[Any]) -> int:
    return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else 0
