"""Publishes weights: one version of one model to every instance, confirmed by each.

The chunks are put into the object store once (by whoever packed them); every node pulls them once and
its readers map the same memory. An instance confirms with the checksum of what it has loaded, after it has unpacked
every copy that decodes and found those bytes in it (`ModelRunner.load_parts`): a version is only called
published when every instance decodes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import ray

from ...actors.actor_messages import LoadedWeights
from ...actors.remote.remote import Handle
from ...actors.remote.waiting import awake_s, get, get_all
from ...actors.remote.watch import LOOK_S
from ...core.errors import InstanceLost, PeerLost, RlhfSpecError, WaitTimeout, WeightsError
from ...core.weight_records import DigestKind, WeightManifest

_Brought = TypeVar("_Brought")
_GRACE_S = 5.0
"The caller waits longer than the instance, so that the instance's own message arrives."


@dataclass(slots=True, kw_only=True)
class PublishedWeights:
    """A manifest with references to its chunks; they live as long as this record."""

    manifest: WeightManifest
    chunk_refs: tuple[Any, ...]
    fetch: Callable[[], Fetching] | None = None
    "of chunks that are not in the object store: orders them there, when they are first asked for"
    part_seconds: dict[str, float] = field(default_factory=dict)
    "what its publication took: pack, send, load, confirm; they add up"
    _coming: Fetching | None = None

    def drop_chunks(self, fetch: Callable[[], Fetching]) -> None:
        """Give the chunks' memory back: `fetch` brings them again where they are asked for."""
        self.chunk_refs, self.fetch = (), fetch

    def refs(self) -> tuple[Any, ...]:
        """The chunks, from whoever has them. Raises WeightsError when that one has another version by now."""
        if self.fetch is not None and not self._take(self._asked(lambda coming: coming.wait())):
            raise WeightsError(
                f"expected the trainer to hold {self.manifest.model} version {self.manifest.weight_version}, and it "
                "has trained on; only its present version can be brought again"
            )
        return self.chunk_refs

    def refs_so_far(self, *, may_ask: bool) -> tuple[Any, ...] | None:
        """The chunks where they are there, without a wait; None: they are on their way, or cannot be had now.

        `may_ask`: whether whoever has them may be asked. Raises what `refs` raises but for a newer version, with which
        another one comes.
        """
        if self.fetch is None:
            return self.chunk_refs
        if self._coming is None and not may_ask:
            return None
        brought = self._asked(lambda coming: coming.look())
        return self.chunk_refs if brought is not None and self._take(brought) else None

    def _asked(self, how: Callable[[Fetching], _Brought]) -> _Brought:
        """Order the chunks where they are not on their way, and look or wait for them."""
        assert self.fetch is not None
        self._coming = self._coming or self.fetch()
        try:
            return how(self._coming)
        except RlhfSpecError:
            self._coming = None
            raise

    def _take(self, brought: PublishedWeights) -> bool:
        """Keep what was brought; False: it is a newer version. Raises WeightsError: it is another one."""
        own, its = self.manifest, brought.manifest
        self._coming = None
        if its.weight_version > own.weight_version:
            return False
        if not its.describes_what(own):
            raise WeightsError(
                f"expected the trainer to hold {own.model} version {own.weight_version} with checksum {own.checksum}, "
                f"got version {its.weight_version} with {its.checksum}"
            )
        # other chunks, perhaps: those are here
        self.manifest, self.chunk_refs, self.fetch = its, brought.chunk_refs, None
        return True


class Fetching:
    """Weights on their way from a trainer into the object store, chunk by chunk; the references outlive the trainer."""

    def __init__(
        self,
        trainer: Handle,
        *,
        timeout_s: float,
        model: Literal["target", "draft"] = "target",
        helpers: Mapping[str, Any] | None = None,
        checksums: DigestKind | None = None,
    ) -> None:
        """Order them. `helpers`: answers to come, by name, of trainers that take part while the first packs.

        `checksums`: the kind of the whole's; None: as the trainer publishes.
        """
        self._chunks = trainer.packed.options(num_returns="streaming").remote(model, checksums)
        self._model, self._timeout_s, self._helpers = model, timeout_s, helpers or {}
        self._refs: list[Any] = []
        self._brought: PublishedWeights | None = None
        self._ends_s = awake_s() + timeout_s

    def look(self) -> PublishedWeights | None:
        """What is there, without a wait; None: not all. Raises WaitTimeout, and what a trainer raised."""
        while self._brought is None:
            if not ray.wait([self._chunks], timeout=0, fetch_local=False)[0]:
                if awake_s() > self._ends_s:
                    raise self._too_late()
                return None
            self._step()
        if self._helpers and not self._have_helped():
            return None
        return self._brought

    def wait(self, meanwhile: Callable[[], None] | None = None) -> PublishedWeights:
        """All of it; `meanwhile` is called about every second. Raises WaitTimeout, and what a trainer raised."""
        while self._brought is None:
            left_s = self._ends_s - awake_s()
            if ray.wait([self._chunks], timeout=min(max(left_s, 0.0), LOOK_S), fetch_local=False)[0]:
                self._step()
            elif left_s <= LOOK_S:
                raise self._too_late()
            elif meanwhile is not None:
                meanwhile()
        if self._helpers:
            self._ask(self._helpers, self._timeout_s)
        return self._brought

    def _step(self) -> None:
        try:
            self._refs.append(next(self._chunks))
        except StopIteration:
            # the last one is the manifest, or what went wrong
            try:
                manifest = get(
                    self._refs.pop(),
                    waiter="the loop",
                    waited_for="trainer",
                    order=f"pack the {self._model} weights",
                    timeout_s=self._timeout_s,
                )
            except PeerLost:
                # who is gone explains why
                self._ask(self._helpers, self._timeout_s)
                raise
            self._brought = PublishedWeights(manifest=manifest, chunk_refs=tuple(self._refs))

    def _have_helped(self) -> bool:
        refs = list(self._helpers.values())
        if len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) < len(refs):
            if awake_s() > self._ends_s:
                self._ask(self._helpers, 0.0)
            return False
        self._ask(self._helpers, self._timeout_s)
        self._helpers = {}
        return True

    def _ask(self, helpers: Mapping[str, Any], timeout_s: float) -> None:
        get_all(
            helpers, waiter="the loop", order=f"help to pack the {self._model} weights", timeout_s=timeout_s
        )

    def _too_late(self) -> WaitTimeout:
        return WaitTimeout(
            waiter="the loop",
            waited_for="trainer",
            order=f"pack the {self._model} weights (chunk {len(self._refs)})",
            waited_s=self._timeout_s,
            advice="raise cluster.order_timeout_s if the trainer is only slow",
        )


def publish(
    weights: PublishedWeights, instances: Mapping[str, Handle], *, timeout_s: float
) -> dict[str, InstanceLost]:
    """Load the version on every instance at once (none may have an open sample).

    Returns the instances that died meanwhile; each other one has confirmed version and checksum. What it took is noted
    in `weights.part_seconds`, packing apart.
    Raises WeightsError for a wrong confirmation, WaitTimeout for a missing one.
    """
    began_s = awake_s()
    manifest = weights.manifest
    chunks = weights.refs()
    refs = {
        name: handle.load_weights.remote(timeout_s, manifest, *chunks) for name, handle in instances.items()
    }
    deadline_s = awake_s() + timeout_s + _GRACE_S
    lost: dict[str, InstanceLost] = {}
    answers: list[LoadedWeights] = []
    for name, ref in refs.items():
        try:
            answer = get(
                ref,
                waiter="the loop",
                waited_for=name,
                order=f"load {manifest.model} version {manifest.weight_version}",
                timeout_s=max(0.0, deadline_s - awake_s()),
            )
        except InstanceLost as error:
            lost[name] = error
        else:
            confirm(answer, manifest)
            answers.append(answer)
    weights.part_seconds |= part_seconds(awake_s() - began_s, answers)
    return lost


def part_seconds(
    elapsed_s: float, answers: Sequence[LoadedWeights], *, pack_s: float = 0.0
) -> dict[str, float]:
    """Split the seconds of a publication: the slowest instance's loading, and packing; what is left was the way."""
    load_s = max((answer.load_s for answer in answers), default=0.0)
    own = {"load": load_s} | ({"pack": pack_s} if pack_s else {})
    return own | {"send": max(elapsed_s - sum(own.values()), 0.0)}


def confirm(answer: LoadedWeights, manifest: WeightManifest) -> None:
    """Require that what was loaded is what was published. Raises WeightsError."""
    expected = (manifest.weight_version, manifest.checksum)
    got = (answer.weight_version, answer.checksum)
    if got != expected:
        raise WeightsError(
            f"{answer.instance} confirmed {answer.model} version {got[0]} with checksum {got[1]}, expected "
            f"version {expected[0]} with {expected[1]}; the run stops rather than sample from other weights"
        )
