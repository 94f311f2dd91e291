"""Instances that start, the first ones too, and instances that leave.

Each waits for its place, builds, loads the current weights, and joins. Everything is ordered at once and only looked at
later, so nobody waits: Ray starts the actor when its bundle is there, and its mailbox holds the weights. A version
published meanwhile is sent after it. One that leaves has been emptied: what it still has to tell is fetched, then it is
ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from ...actors.actor_messages import GenerationSpec, InstanceNumerics, LoadedWeights
from ...actors.remote.remote import Handle
from ...actors.remote.waiting import get, no_answer, wait_any
from ...actors.remote.watch import LOOK_S, OpenWait
from ...actors.trace_events import TraceEvent
from ...core.errors import InstanceLost, NodeDied, RlhfSpecError, WaitTimeout
from ..plan.topology import PlacementSlot
from ..weights.publish import PublishedWeights, confirm
from .placement_slots import PlacementSlots, is_placed

LOGGED_AFTER_S = 20.0
"Without a place for so long, what is missing is said; the wish stays open, since nodes may still come."
GRACE_S = 5.0
"For the final report of one that leaves."
PLACES_EVERY_S = 1.0
"Between two looks at one's place."


@dataclass(slots=True, kw_only=True)
class StartingInstance:
    """One instance on its way."""

    name: str
    place: PlacementSlot
    group: PlacementGroup | None
    "its own bundle; None: one of the run's first places"
    spec: GenerationSpec
    handle: Handle
    sentinel: Any
    began_s: float
    placed_s: float | None = None
    "since when its place is reserved; None: it is not"
    sent_s: float | None = None
    "since when all that it is to load has been sent; None: something is with trainers that learn"
    looked_s: float | None = None
    "when its place was looked at last"
    loads: dict[str, tuple[PublishedWeights, Any]] = field(default_factory=dict)
    "by model: the version that was sent last, and the answer to come"
    words: list[Any] = field(default_factory=list)
    "answers to come: its numerics, its node"
    is_logged: bool = False

    @property
    def started_s(self) -> float:
        """Seconds since it was decided on."""
        return time.monotonic() - self.began_s

    def is_due(self, now_s: float) -> bool:
        """Whether its place is to be looked at."""
        return self.looked_s is None or now_s - self.looked_s >= PLACES_EVERY_S

    @property
    def answers(self) -> list[Any]:
        """References to what it has been asked."""
        return [ref for _, ref in self.loads.values()] + self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One that holds the current weights."""

    instance: StartingInstance
    numerics: InstanceNumerics
    node: str


class StartingInstances:
    """Those of one pool."""

    def __init__(
        self,
        places: PlacementSlots,
        note: Callable[[str], None],
        order: Callable[[str, PlacementSlot, PlacementGroup | None], StartingInstance],
        *,
        start_timeout_s: float,
    ) -> None:
        """`order` starts an actor by its name. One that is given up gives its place back."""
        self._places, self._note, self._order, self._start_timeout_s = places, note, order, start_timeout_s
        self._coming: list[StartingInstance] = []
        self._reserved: set[int] = set()
        "bundles of first places, as looked at last"

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def names(self) -> list[str]:
        """In the order in which they were ordered."""
        return [one.name for one in self._coming]

    @property
    def have_a_place(self) -> bool:
        """Whether one of them has."""
        return any(one.placed_s is not None for one in self._coming)

    def start(self, name: str, place: PlacementSlot, group: PlacementGroup | None = None) -> None:
        """Order an instance, in a single bundle where `group` is one, and look after it."""
        self._coming.append(self._order(name, place, group))

    def without_place(self) -> StartingInstance | None:
        """The oldest that waits for a bundle of its own."""
        return next((one for one in self._coming if one.group is not None and one.placed_s is None), None)

    def cancel(self, count: int) -> list[str]:
        """Give up so many, the youngest first, and only those that wait for a bundle of their own."""
        without = [one for one in reversed(self._coming) if one.placed_s is None and one.group is not None]
        for one in without[:count]:
            self.drop(one)
        return [one.name for one in without[:count]]

    def cancel_all(self) -> None:
        """Give up whatever is on its way."""
        for one in list(self._coming):
            self.drop(one)

    def give_up(self, name: str) -> None:
        """Give up the one of this name, where it is still on its way."""
        for one in [one for one in self._coming if one.name == name]:
            self.drop(one)

    def drop(self, one: StartingInstance) -> None:
        """Give one up: its actor ends, its place is free."""
        self._coming.remove(one)
        ray.kill(one.handle)
        self._places.give_back(one.place, one.group)

    def bring_up(self, weights: Mapping[str, PublishedWeights]) -> list[Ready]:
        """Wait until all that are on their way hold the weights; in the order in which they were ordered.

        Raises what one of them could not start by: InstanceLost, WaitTimeout, or an error of its own.
        """
        names = self.names
        wait = OpenWait(
            waiter="the loop",
            waited_for=", ".join(names),
            order="start and load the weights",
            timeout_s=self._start_timeout_s,
        )
        done: dict[str, Ready] = {}
        while self._coming:
            ready, failed = self.look(weights, may_fetch=True, num_there=0)
            for _, error in failed:
                raise error
            done |= {one.instance.name: one for one in ready}
            if not ready and self._coming and not wait_any(self._awaited(), timeout_s=LOOK_S):
                wait.look()
                if wait.left_s <= 0.0:
                    raise no_answer(
                        "the loop", ", ".join(self.names), "start and load the weights", wait.waited_s
                    )
        wait.answered()
        return [done[name] for name in names]

    def look(
        self, weights: Mapping[str, PublishedWeights], *, may_fetch: bool, num_there: int
    ) -> tuple[list[Ready], list[tuple[StartingInstance, RlhfSpecError]]]:
        """Send versions that are new, and take those in that hold all of them. Waits for nobody.

        Args:
            weights: the current version of each model.
            may_fetch: whether the trainer can be asked for what was broadcast.
            num_there: instances that the run goes on with, for what is said.

        Returns:
            those that are ready, and those that failed with the reason; their places are given back.

        Raises what a trainer that was asked for weights fails with.
        """
        ready: list[Ready] = []
        failed: list[tuple[StartingInstance, RlhfSpecError]] = []
        self._look_for_first_places()
        for one in list(self._coming):
            has_place = self._has_place(one, num_there)
            chunks = self._chunks(one, weights, may_fetch=may_fetch) if has_place else {}
            try:
                found = self._look_at(one, weights, chunks)
            except NodeDied:
                raise
            except RlhfSpecError as error:
                self.drop(one)
                failed.append((one, error))
            else:
                if found is not None:
                    self._coming.remove(one)
                    ready.append(found)
        return ready, failed

    def explain(self, one: StartingInstance) -> str:
        """Why it may not have a place."""
        return self._places.explain(replace(one.place, name=one.name), waited_s=one.started_s)

    def what_is_missing(self) -> str:
        """Of those that have no place, what keeps the oldest from one; empty: all have one."""
        return next((self.explain(one) for one in self._coming if one.placed_s is None), "")

    def _awaited(self) -> list[Any]:
        """References of which one changes something."""
        refs = [ref for one in self._coming for ref in one.answers]
        _, awaited = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        return awaited + [one.sentinel for one in self._coming]

    def _look_at(
        self,
        one: StartingInstance,
        weights: Mapping[str, PublishedWeights],
        chunks: Mapping[str, tuple[Any, ...]],
    ) -> Ready | None:
        for model, refs in chunks.items():
            sent = one.handle.load_weights.remote(self._start_timeout_s, weights[model].manifest, *refs)
            one.loads[model] = (weights[model], sent)
        now_s, has_all = time.monotonic(), len(one.loads) == len(one.spec.model_names)
        one.sent_s = one.sent_s or (now_s if has_all else None)
        if not has_all or _num_ready(one.answers) < len(one.answers):
            self._require_on_its_way(one, now_s - max(one.placed_s or now_s, one.sent_s or now_s))
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
        return Ready(instance=one, numerics=numerics, node=node)

    def _look_for_first_places(self) -> None:
        """See which are reserved, once for all that wait there."""
        now_s = time.monotonic()
        if any(one.group is None and one.is_due(now_s) for one in self._coming):
            self._reserved = self._places.reserved()

    def _has_place(self, one: StartingInstance, num_there: int) -> bool:
        """Whether its bundle is reserved; one of the run's may go with its node, and come again."""
        now_s = time.monotonic()
        if one.is_due(now_s):
            one.looked_s = now_s
            if one.group is None:
                there = one.place.bundle in self._reserved
            else:
                there = one.placed_s is not None or is_placed(one.group)
            one.placed_s = (one.placed_s or now_s) if there else None
        if one.placed_s is None and not one.is_logged and one.started_s > LOGGED_AFTER_S:
            one.is_logged = True
            self._note(
                f"{self.explain(one)}; the run goes on with {num_there} instances, and it joins when there is room"
            )
        return one.placed_s is not None

    def _chunks(
        self, one: StartingInstance, weights: Mapping[str, PublishedWeights], *, may_fetch: bool
    ) -> dict[str, tuple[Any, ...]]:
        """What it is to be sent now, by model: versions that it was not sent and that are at hand."""
        found: dict[str, tuple[Any, ...]] = {}
        for model in one.spec.model_names:
            current = weights[model]
            if model in one.loads and one.loads[model][0] is current:
                continue
            refs = current.refs_so_far(may_ask=may_fetch)
            if refs is not None:
                found[model] = refs
        return found

    def _require_on_its_way(self, one: StartingInstance, waited_s: float) -> None:
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
            for model, (sent, ref) in one.loads.items():
                # where it has failed on an order, that says more
                if _num_ready([ref]):
                    self._answer(one, ref, f"load {model} version {sent.manifest.weight_version}")
            self._answer(one, one.sentinel, "decode")
            raise InstanceLost(f"{one.name} left its loop before it had joined")

    def _answer(self, one: StartingInstance, ref: Any, order: str) -> Any:
        return get(ref, waiter="the loop", waited_for=one.name, order=order, timeout_s=self._start_timeout_s)


def _num_ready(refs: list[Any]) -> int:
    return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReport:
    """What an instance did since it was last asked."""

    spans: list[TraceEvent]
    steps: bytes
    "its step log as a file; empty without one"


@dataclass(frozen=True, slots=True)
class _Leaving:
    name: str
    handle: Handle
    refs: list[Any]
    ends_s: float
    then: Callable[[], None]


class LeavingInstances:
    """Those of one pool."""

    def __init__(self) -> None:
        self._leaving: list[_Leaving] = []
        self._reports: dict[str, FinalReport] = {}

    def begin(self, name: str, handle: Handle, then: Callable[[], None]) -> None:
        """Ask for its final report and to leave its loop; `then` is called when it has been ended."""
        refs = [handle.take_spans.remote(), handle.take_step_log.remote(GRACE_S), handle.stop.remote(GRACE_S)]
        self._leaving.append(_Leaving(name, handle, refs, time.monotonic() + GRACE_S, then))

    def look(self) -> None:
        """End those that have answered, or have had their time."""
        for one in list(self._leaving):
            ready = ray.wait(one.refs, num_returns=len(one.refs), timeout=0)[0]
            if len(ready) < len(one.refs) and time.monotonic() < one.ends_s:
                continue
            self._leaving.remove(one)
            try:
                spans, steps = get(
                    one.refs[:2],
                    waiter="the loop",
                    waited_for=one.name,
                    order="make its final report",
                    timeout_s=0.0,
                )
                self._reports[one.name] = FinalReport(spans=spans, steps=steps)
            except RlhfSpecError:
                # a timeline and a log, not worth a wait: it may have died meanwhile
                pass
            ray.kill(one.handle)
            one.then()

    def take(self) -> dict[str, FinalReport]:
        """The final reports since the last call, by instance."""
        reports, self._reports = self._reports, {}
        return reports
