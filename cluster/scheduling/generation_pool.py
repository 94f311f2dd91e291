"""The generation pool: makes instances, gives them the current weights, replaces lost ones.

The loop's process makes every actor, so instances outlive a scheduler, and the chunks of the current
versions stay referenced here for whoever joins later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray

from actors.actor_messages import GenerationSpec, InstanceNumerics, LostInstance
from actors.generation.generation_actor import GenerationActor
from actors.ray_utils import run_metrics
from actors.ray_utils.remote import Handle
from actors.ray_utils.waiting import get
from cluster.placement.topology import Place, PlacementContext, actor_options
from cluster.scheduling.instance_table import Instance, InstanceTable
from cluster.scheduling.scheduler_client import SchedulerClient
from cluster.weights.publish import PublishedWeights, publish
from core.config import ClusterConfig
from core.errors import InstanceLost
from policies.scheduling.members import InstanceState


class GenerationPool:
    """Owns the generation actors of one run."""

    def __init__(
        self,
        *,
        cluster: ClusterConfig,
        places: tuple[Place, ...],
        context: PlacementContext,
        scheduler: SchedulerClient,
        instances: InstanceTable,
        spec_for: Callable[[str], GenerationSpec],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """None is made so far; each gets a row of `instances`. `note` is told of each replacement, in one line."""
        self._cluster = cluster
        self._places = places
        self._context = context
        self._scheduler = scheduler
        self._instances = instances
        self._spec_for = spec_for
        self._note = note
        self._weights: dict[str, PublishedWeights] = {}
        self._num_restarts = 0
        self._less_than_bits: list[str] = []
        self._rounds_by = ""

    @property
    def instances(self) -> Mapping[str, Handle]:
        """Living instances by name."""
        return self._instances.handles

    def make_all(self) -> None:
        """Start the processes of all instances; they come up while the caller goes on."""
        for place in self._places:
            self._make(place.name, place)

    def bring_up(self, *weights: PublishedWeights) -> None:
        """Give all instances their first weights. Raises InstanceLost when one cannot start."""
        self._weights = {w.manifest.model: w for w in weights}
        self._bring_up(list(self.instances))

    def keep(self, weights: PublishedWeights) -> None:
        """Take note of a version that every instance has got by another way: replacements get it."""
        self._weights[weights.manifest.model] = weights

    def publish(self, weights: PublishedWeights) -> None:
        """Publish a new version to every instance; one that died since it was last heard of is replaced."""
        self._weights[weights.manifest.model] = weights
        lost = publish(weights, self.instances, timeout_s=self._cluster.order_timeout_s)
        for name, error in lost.items():
            self._scheduler.lose(name, str(error))
            self.replace(LostInstance(instance=name, reason=str(error), num_requeued=0))

    def replace(self, lost: LostInstance) -> str | None:
        """Make a replacement with the current weights; its name, or None when it was replaced before.

        Raises InstanceLost when `cluster.max_instance_restarts` are used up.
        """
        row = self._instances[lost.instance]
        place, row.place = row.place, None
        if place is None:
            return None
        row.state = InstanceState.GONE
        ray.kill(row.handle)
        run_metrics.add("lost_actors", pool="generation")
        self._num_restarts += 1
        if self._num_restarts > self._cluster.max_instance_restarts:
            raise InstanceLost(
                f"instance {lost.instance} was lost ({lost.reason}) and all "
                f"{self._cluster.max_instance_restarts} replacements of this run are used up; look at the "
                "actors' logs in the Ray dashboard, or raise cluster.max_instance_restarts"
            )
        name = f"{place.name}-r{self._num_restarts}"
        again = f"{lost.num_requeued} samples were queued again, " if lost.num_requeued else ""
        self._note(f"instance {lost.instance} was lost ({lost.reason}); {again}{name} takes its place")
        self._make(name, place)
        run_metrics.add("replaced_actors", pool="generation")
        try:
            self._bring_up([name])
        except InstanceLost as error:
            return self.replace(LostInstance(instance=name, reason=str(error), num_requeued=0))
        return name

    def stop(self) -> None:
        """Let every instance leave its loop, so that its gauges end at 0."""
        refs: list[Any] = [handle.stop.remote(1.0) for handle in self.instances.values()]
        ray.wait(refs, num_returns=len(refs), timeout=2.0)

    def _make(self, name: str, place: Place) -> None:
        options = actor_options(place, self._context) | {"name": name}
        spec = self._spec_for(name)
        handle = GenerationActor.options(**options).remote(spec)
        self._instances[name] = Instance(
            handle=handle,
            num_slots=spec.engine.max_running_samples,
            place=place,
            sentinel=handle.run.remote(),
        )

    def _bring_up(self, names: list[str]) -> None:
        """Load the first weights (module building and the probe included), then let them take samples."""
        handles = {name: self._instances[name].handle for name in names}
        for model in self._spec_for(names[0]).model_names:
            lost = publish(self._weights[model], handles, timeout_s=self._cluster.start_timeout_s)
            for error in lost.values():
                raise error
        self._ask_numerics(handles)
        for name in names:
            self._scheduler.join(name)

    def _ask_numerics(self, handles: Mapping[str, Handle]) -> None:
        """Note every way in which instances promise less than bits, once.

        Instances that round by unlike code give the same distribution, but not the same bits.
        """
        for name, handle in handles.items():
            told: InstanceNumerics = get(
                handle.numerics.remote(),
                waiter="the loop",
                waited_for=name,
                order="say what its numerics promise",
                timeout_s=self._cluster.order_timeout_s,
            )
            self._rounds_by = self._rounds_by or told.rounds_by
            less = [] if told.promise.startswith("invariant") else [told.promise]
            if told.rounds_by != self._rounds_by:
                less.append(
                    f"it rounds by {told.rounds_by}, the first instance by {self._rounds_by}: tokens of a sample may "
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
