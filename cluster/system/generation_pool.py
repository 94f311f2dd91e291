"""The generation pool: makes instances, gives them the current weights, replaces lost ones, grows and shrinks.

The loop's process makes every actor, so instances outlive a scheduler, and the chunks of the current
versions stay referenced here for whoever joins later. The first instances stand in the run's one placement group and
are waited for; whoever comes later starts beside the run (`replacement_and_resizing`), in the place of one that is
gone or in a bundle of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from ...actors.actor_messages import FinishedText, GenerationSpec, InstanceNumerics, LostInstance, Taken
from ...actors.generation.generation_actor import GenerationActor
from ...actors.remote.deaths import DEATHS, last_line
from ...actors.remote.remote import Handle
from ...core.config import ClusterConfig
from ...core.records import Rollout
from ..plan.topology import PlacementContext, PlacementSlot, Topology, actor_options
from ..weights.publish import PublishedWeights, publish
from .instance_table import InstanceTable
from .placement_slots import PlacementSlots
from .replacement_and_resizing import PoolChanges
from .scheduler_client import SchedulerClient
from .starting_and_leaving import FinalReport, StartingInstance


class GenerationPool:
    """Owns the generation actors of one run."""

    def __init__(
        self,
        *,
        cluster: ClusterConfig,
        topology: Topology,
        context: PlacementContext,
        places: PlacementSlots,
        scheduler: SchedulerClient,
        instances: InstanceTable,
        spec_for: Callable[[str], GenerationSpec],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """None is made so far; each gets a row of `instances`. `note` is told of each change, in one line."""
        self._cluster = cluster
        self._context = context
        self._scheduler = scheduler
        self._instances = instances
        self._spec_for = spec_for
        self._note = note
        self._weights: dict[str, PublishedWeights] = {}
        self._less_than_bits: list[str] = []
        self._rounds_by = ""
        self._began_s = 0.0
        self._pending: list[Any] = []
        self._has_noted_failure = False
        self._changes = PoolChanges(
            cluster, topology, places, scheduler, instances, order=self._order, note=note
        )

    @property
    def instances(self) -> Mapping[str, Handle]:
        """Living instances by name."""
        return self._instances.handles

    def make_all(self) -> None:
        """Start the processes of all instances; they come up while the caller goes on."""
        self._began_s = time.monotonic()
        self._changes.order_first()

    def bring_up(self, *weights: PublishedWeights) -> None:
        """Give all instances their first weights. Raises InstanceLost and the like when one cannot start."""
        self._weights = {w.manifest.model: w for w in weights}
        for ready in self._changes.bring_up_first(self._weights):
            self._note_numerics(ready.instance.name, ready.numerics)
        self._changes.begin(start_up_s=time.monotonic() - self._began_s)

    def look(self, taken: Taken, *, may_fetch: bool = True) -> None:
        """Carry out what the scheduler decided of the pool's size, take in who has started, empty nodes that end.

        To be called often; waits for nobody. `may_fetch`: whether the trainer can be asked for weights.
        Raises WaitTimeout when there has been no instance for too long.
        """
        for ready in self._changes.look(taken, self._weights, may_fetch=may_fetch):
            self._note_numerics(ready.instance.name, ready.numerics)
            self._changes.join(ready)

    def rollouts_ahead(self, count: int) -> None:
        """Say how many rollouts the run will ask for after the present one."""
        self._changes.rollouts_ahead = count

    def final_reports(self) -> dict[str, FinalReport]:
        """What instances that have left since the last call did before, by name."""
        return self._changes.leaving.take()

    def metrics(self) -> dict[str, float]:
        """The pool's changes since the last call; empty where it is fixed and nothing has happened."""
        return self._changes.metrics()

    def keep(self, weights: PublishedWeights) -> None:
        """Take note of a version that every instance has got by another way: replacements get it."""
        self._weights[weights.manifest.model] = weights

    def remember(self, rollouts: Sequence[Rollout]) -> None:
        """Tell every instance what the others have finished, where drafts are looked up in it; nobody waits."""
        instances = self.instances
        if len(instances) < 2:
            return
        texts = ray.put(
            [
                FinishedText(
                    instance=rollout.completion.instance,
                    prompt=rollout.prompt.token_ids,
                    response=rollout.completion.token_ids,
                )
                for rollout in rollouts
            ]
        )
        self._pending = self._unanswered() + [
            handle.remember.remote(texts, self._cluster.order_timeout_s) for handle in instances.values()
        ]

    def _unanswered(self) -> list[Any]:
        """What of `remember` has no answer yet; the first that failed is said, a death elsewhere."""
        ready, pending = (
            ray.wait(self._pending, num_returns=len(self._pending), timeout=0) if self._pending else ([], [])
        )
        for ref in ready:
            try:
                ray.get(ref, timeout=self._cluster.order_timeout_s)
            except DEATHS:
                continue
            except Exception as error:
                if not self._has_noted_failure:
                    self._has_noted_failure = True
                    self._note(
                        "an instance could not be told what others have finished, it drafts from its own alone: "
                        f"{last_line(error)}; the run goes on, and later ones are not said"
                    )
        return pending

    def publish(self, weights: PublishedWeights) -> None:
        """Publish a new version to every instance; one that died since it was last heard of is replaced."""
        self._weights[weights.manifest.model] = weights
        lost = publish(weights, self.instances, timeout_s=self._cluster.order_timeout_s)
        for name, error in lost.items():
            reason = self._scheduler.lose(name, str(error))
            self.replace(LostInstance(instance=name, reason=reason, num_requeued=0))

    def replace(self, lost: LostInstance) -> str | None:
        """Start a replacement beside the run; its name, or None where none takes the place at once.

        Raises InstanceLost when `cluster.max_instance_restarts` are used up.
        """
        return self._changes.lose(lost)

    def stop(self) -> None:
        """Let every instance leave its loop, so that its gauges end at 0."""
        self._changes.stop()
        refs: list[Any] = [handle.stop.remote(1.0) for handle in self.instances.values()]
        ray.wait(refs, num_returns=len(refs), timeout=2.0)

    def _order(self, name: str, place: PlacementSlot, group: PlacementGroup | None) -> StartingInstance:
        """Start the process of an instance; `group`: its own bundle, where it has one."""
        context = self._context if group is None else replace(self._context, group=group)
        spec = self._spec_for(name)
        if place.num_ranks > 1:
            spec = replace(spec, bundle=place.bundle, namespace=context.namespace)
        handle = GenerationActor.options(**actor_options(place, context) | {"name": name}).remote(spec)
        return StartingInstance(
            name=name,
            place=place,
            group=group,
            spec=spec,
            handle=handle,
            sentinel=handle.run.remote(),
            began_s=time.monotonic(),
        )

    def _note_numerics(self, name: str, numerics: InstanceNumerics) -> None:
        self._rounds_by = self._rounds_by or numerics.rounds_by
        less = [] if numerics.promise.startswith("invariant") else [numerics.promise]
        if numerics.rounds_by != self._rounds_by:
            less.append(
                f"it rounds by {numerics.rounds_by}, the first instance by {self._rounds_by}: tokens of a sample may "
                "depend on its instance; install the same packages on nodes of one kind"
            )
        for reason in less:
            if reason not in self._less_than_bits:
                self._less_than_bits.append(reason)
                self._note(f"numerics on {name}: {reason}")

    @property
    def is_invariant(self) -> bool:
        """Whether every instance there was promises bits."""
        return not self._less_than_bits
