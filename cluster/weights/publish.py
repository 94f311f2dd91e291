"""Publishes weights: one version of one model to every instance, confirmed by each.

The chunks are put into the object store once (by whoever packed them); every node pulls them once and
its readers map the same memory. An instance confirms with the checksum of what it has loaded, after it has unpacked
every copy that decodes and found those bytes in it (`ModelRunner.require_copies_hold`): a version is only called
published when every instance decodes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray

from actors.actor_messages import LoadedWeights
from actors.ray_utils.remote import Handle
from actors.ray_utils.waiting import awake_s, get
from core.errors import InstanceLost, WaitTimeout, WeightsError
from core.weight_records import WeightManifest

_GRACE_S = 5.0
"The caller waits longer than the instance, so that the instance's own message arrives."


@dataclass(slots=True, kw_only=True)
class PublishedWeights:
    """A manifest with references to its chunks; they live as long as this record."""

    manifest: WeightManifest
    chunk_refs: tuple[Any, ...]
    fetch: Callable[[], PublishedWeights] | None = None
    "for a version that was broadcast: brings its chunks into the object store when they are first asked for"

    def refs(self) -> tuple[Any, ...]:
        """The chunks, from whoever has them. Raises WeightsError when that one has another version by now."""
        if self.fetch is not None:
            brought = self.fetch()
            if brought.manifest != self.manifest:
                raise WeightsError(
                    f"expected the trainer to hold {self.manifest.model} version {self.manifest.weight_version} with "
                    f"checksum {self.manifest.checksum}, got version {brought.manifest.weight_version} with "
                    f"{brought.manifest.checksum}; only the trainer's present version can be brought again"
                )
            self.chunk_refs, self.fetch = brought.chunk_refs, None
        return self.chunk_refs


def from_trainer(
    trainer: Handle, *, timeout_s: float, model: Literal["target", "draft"] = "target"
) -> PublishedWeights:
    """Take a model's current weights, chunk by chunk into the object store; the references outlive the trainer.

    Raises WaitTimeout, and what the trainer raised.
    """
    chunks = trainer.packed.options(num_returns="streaming").remote(model)
    ends_s = awake_s() + timeout_s
    refs: list[Any] = []
    while True:
        left_s = ends_s - awake_s()
        ready, _ = ray.wait([chunks], timeout=max(left_s, 0.0), fetch_local=False)
        if not ready:
            raise WaitTimeout(
                waiter="the loop",
                waited_for="trainer",
                order=f"pack the {model} weights (chunk {len(refs)})",
                waited_s=timeout_s,
                advice="raise cluster.order_timeout_s if the trainer is only slow",
            )
        try:
            refs.append(next(chunks))
        except StopIteration:
            break
    # the last one is the manifest, or what went wrong
    manifest = get(
        refs.pop(),
        waiter="the loop",
        waited_for="trainer",
        order=f"pack the {model} weights",
        timeout_s=timeout_s,
    )
    return PublishedWeights(manifest=manifest, chunk_refs=tuple(refs))


def publish(
    weights: PublishedWeights, instances: Mapping[str, Handle], *, timeout_s: float
) -> dict[str, InstanceLost]:
    """Load the version on every instance at once (none may have an open sample).

    Returns the instances that died meanwhile; each other one has confirmed version and checksum.
    Raises WeightsError for a wrong confirmation, WaitTimeout for a missing one.
    """
    manifest = weights.manifest
    chunks = weights.refs()
    refs = {
        name: handle.load_weights.remote(timeout_s, manifest, *chunks) for name, handle in instances.items()
    }
    deadline_s = awake_s() + timeout_s + _GRACE_S
    lost: dict[str, InstanceLost] = {}
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
    return lost


def confirm(answer: LoadedWeights, manifest: WeightManifest) -> None:
    """Require that what was loaded is what was published. Raises WeightsError."""
    expected = (manifest.weight_version, manifest.checksum)
    got = (answer.weight_version, answer.checksum)
    if got != expected:
        raise WeightsError(
            f"{answer.instance} confirmed {answer.model} version {got[0]} with checksum {got[1]}, expected "
            f"version {expected[0]} with {expected[1]}; the run stops rather than sample from other weights"
        )
