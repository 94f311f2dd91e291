"""A generation pool whose Ray is played: actors answer when the test says so, bundles and nodes are a table."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhfspec.actors.actor_messages import InstanceNumerics, LoadedWeights, LostInstance, Taken
from rlhfspec.actors.remote.waiting import ActorDied
from rlhfspec.cluster.plan.topology import PlacementContext, PlacementSlot, Topology
from rlhfspec.cluster.system import (
    generation_pool,
    placement_slots,
    replacement_and_resizing,
    starting_and_leaving,
)
from rlhfspec.cluster.system.generation_pool import GenerationPool
from rlhfspec.cluster.system.instance_table import InstanceTable
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.config import ClusterConfig
from rlhfspec.core.errors import InstanceLost
from rlhfspec.core.weight_records import WeightManifest
from rlhfspec.policies.scheduling.events import Left
from rlhfspec.policies.scheduling.members import InstanceState

RUN_GROUP = "the run's group"
LOST = "its machine, or Ray on it, died"


def weights(version: int = 0, *, model: str = "target", **fields: Any) -> PublishedWeights:
    """A version without a byte."""
    manifest = WeightManifest(
        model=model,
        weight_version=version,
        checksum=f"sum {version}",
        num_bytes=0,
        chunk_num_bytes=(),
        chunk_checksums=(),
        tensors=(),
        hf_config_json="{}",
    )
    return PublishedWeights(manifest=manifest, chunk_refs=(), **fields)


class Actor:
    """Loads what it is given, unless its place is not reserved, it is slow, or it is dead."""

    def __init__(self, world: ScriptedPool, name: str, place: PlacementSlot) -> None:
        self.world, self.name, self.place = world, name, place
        self.loaded: list[int] = []

    def __getattr__(self, order: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Answer(self, order, arguments))


class Answer:
    """What an order comes to, once there is something."""

    def __init__(self, actor: Actor, order: str, arguments: tuple) -> None:
        self.actor, self.order, self.arguments = actor, order, arguments
        if order == "load_weights":
            actor.loaded.append(arguments[1].weight_version)

    @property
    def is_there(self) -> bool:
        world, name = self.actor.world, self.actor.name
        if name in world.dead:
            return True
        return self.order != "run" and name not in world.slow and bool(self._node)

    @property
    def _node(self) -> str:
        return self.actor.world.node_of(self.actor.world.group_of[self.actor.name], self.actor.place.bundle)

    def get(self) -> Any:
        world, name = self.actor.world, self.actor.name
        if name in world.dead:
            raise ActorDied(f"{name} died: SIGKILL")
        match self.order:
            case "load_weights":
                told = self.arguments[1]
                return LoadedWeights(
                    instance=name,
                    model=told.model,
                    weight_version=told.weight_version,
                    checksum=told.checksum,
                )
            case "numerics":
                return world.numerics
            case "node":
                return self._node
        return []


class PlayedScheduler:
    """Marks rows as the client does."""

    def __init__(self, table: InstanceTable) -> None:
        self.table = table
        self.joined: list[str] = []
        self.lost: list[str] = []
        self.seen: dict[str, str] = {}
        "why it has given up one itself"

    def join(self, name: str) -> None:
        self.table[name].state = InstanceState.SERVING
        self.joined.append(name)

    def lose(self, name: str, reason: str) -> str:
        self.table[name].state = InstanceState.GONE
        self.lost.append(name)
        return self.seen.get(name, reason)

    def leave(self, name: str, reason: str) -> None:
        row = self.table[name]
        row.state, row.leaves_because = InstanceState.LEAVING, reason

    def expect(self, starts: Any, may_leave: tuple[str, ...]) -> None:
        self.starts = starts


class ScriptedSlots(placement_slots.PlacementSlots):
    """Single bundles are called as their instances."""

    def __init__(self, world: ScriptedPool) -> None:
        super().__init__(RUN_GROUP)  # type: ignore[arg-type]
        self.world = world

    def reserve(self, place: PlacementSlot) -> Any:
        self.world.own.append(place.name)
        return place.name

    def give_back(self, place: PlacementSlot, group: Any) -> None:
        if group is None:
            super().give_back(place, None)
        else:
            self.world.own.remove(group)
            self.world.bundles.pop((group, 0), None)

    def explain(self, place: PlacementSlot, *, waited_s: float) -> str:
        return f"{place.name} has had no place for {waited_s:.0f} s"


class ScriptedPool:
    """First place i is on node i at the start; a bundle of its own is nowhere until the test puts it somewhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, up: bool = True, **generation: Any) -> None:
        self.now_s = 1000.0
        self.dead: set[str] = set()
        self.slow: set[str] = set()
        self.notes: list[str] = []
        self.ends: dict[str, float | None] = {}
        self.counted: dict[tuple[str, str], float] = defaultdict(float)
        self.actors: dict[str, Actor] = {}
        self.group_of: dict[str, Any] = {}
        self.own: list[str] = []
        "bundles of their own that are asked for or reserved"
        self.numerics = InstanceNumerics(promise="invariant: every bit", rounds_by="code of our own (cpu)")
        config = ClusterConfig.model_validate(
            {"max_instance_restarts": 2, "generation": {"num_actors": 2} | generation}
        )
        least = config.generation.least
        self.nodes = {f"node-{i}" for i in range(least)}
        self.bundles: dict[tuple[Any, int], str] = {(RUN_GROUP, i): f"node-{i}" for i in range(least)}
        self.table = InstanceTable()
        self.scheduler = PlayedScheduler(self.table)
        self._play(monkeypatch)
        place = PlacementSlot(name="gen-0", bundle=0, num_cpus=1.0, num_gpus=0.0, num_threads=1)
        topology = Topology(
            scheduler=place,
            trainer=(),
            generation=tuple(
                PlacementSlot(name=f"gen-{i}", bundle=i, num_cpus=1.0, num_gpus=0.0, num_threads=1)
                for i in range(least)
            ),
            reward=(),
            strategy="PACK",
            placement_timeout_s=1.0,
        )
        self.pool = GenerationPool(
            cluster=config,
            topology=topology,
            context=PlacementContext(group=RUN_GROUP, namespace="played"),  # type: ignore[arg-type]
            places=ScriptedSlots(self),
            scheduler=self.scheduler,  # type: ignore[arg-type]
            instances=self.table,
            spec_for=lambda name: SimpleNamespace(  # type: ignore[arg-type, return-value]
                model_names=("target",), engine=SimpleNamespace(max_running_samples=4)
            ),
            note=self.notes.append,
        )
        self.weights = weights()
        if up:
            self.pool.make_all()
            self.pool.bring_up(self.weights)

    def _play(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wait(refs: list[Any], **how: Any) -> tuple[list[Any], list[Any]]:
            return [ref for ref in refs if ref.is_there], [ref for ref in refs if not ref.is_there]

        def get(ref: Any, **why: Any) -> Any:
            return [one.get() for one in ref] if isinstance(ref, list) else ref.get()

        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        kind = SimpleNamespace(
            options=lambda name, place, group: SimpleNamespace(
                remote=lambda spec: self._make(name, place, group)
            )
        )
        monkeypatch.setattr(ray, "wait", wait)
        monkeypatch.setattr(ray, "kill", lambda handle: self.dead.add(handle.name))
        monkeypatch.setattr(starting_and_leaving, "get", get)
        for module in (starting_and_leaving, replacement_and_resizing, generation_pool):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(starting_and_leaving, "wait_any", lambda refs, timeout_s: wait(refs)[0])
        monkeypatch.setattr(
            starting_and_leaving, "is_placed", lambda group: self.node_of(group, 0) in self.nodes
        )
        monkeypatch.setattr(replacement_and_resizing, "awake_s", clock.monotonic)
        monkeypatch.setattr(replacement_and_resizing, "announced_ends", lambda nodes: self._ends_of(nodes))
        monkeypatch.setattr(replacement_and_resizing, "run_metrics", SimpleNamespace(add=self._count))
        monkeypatch.setattr(
            placement_slots,
            "nodes_of",
            lambda group: {bundle: node for (of, bundle), node in self.bundles.items() if of == group},
        )
        monkeypatch.setattr(placement_slots, "living_nodes", lambda: self.nodes)
        monkeypatch.setattr(generation_pool, "publish", self._publish)
        monkeypatch.setattr(generation_pool, "GenerationActor", kind)
        monkeypatch.setattr(
            generation_pool, "actor_options", lambda place, where: {"place": place, "group": where.group}
        )

    def _make(self, name: str, place: PlacementSlot, group: Any) -> Actor:
        assert name not in self.actors, "Ray frees a name some time after its actor's death"
        self.actors[name], self.group_of[name] = Actor(self, name, place), group
        return self.actors[name]

    def _count(self, name: str, amount: float = 1.0, *, pool: str) -> None:
        self.counted[name, pool] += amount

    def _ends_of(self, nodes: set[str]) -> dict[str, float | None]:
        return {node: end for node, end in self.ends.items() if node in nodes}

    def _publish(self, what: PublishedWeights, handles: Any, *, timeout_s: float) -> dict[str, InstanceLost]:
        for name, actor in handles.items():
            actor.loaded += [] if name in self.dead else [what.manifest.weight_version]
        return {name: ActorDied(f"{name} died: SIGKILL") for name in handles if name in self.dead}

    def node_of(self, group: Any, bundle: int) -> str:
        return self.bundles.get((group, bundle), "")

    def put(self, name: str, node: str) -> None:
        """Ray reserves the own bundle of this instance on a node."""
        self.nodes.add(node)
        self.bundles[name, 0] = node

    def put_first(self, bundle: int, node: str) -> None:
        """Ray reserves a bundle of the run's group on a node again."""
        self.nodes.add(node)
        self.bundles[RUN_GROUP, bundle] = node

    def look(self, *, after_s: float = 1.5, **taken: Any) -> None:
        """Let the loop look a few times, as it does while it waits."""
        self.now_s += after_s
        self.pool.look(Taken(**taken))
        for _ in range(3):
            self.pool.look(Taken())

    def lose(self, name: str, *, num_requeued: int = 0) -> str | None:
        """The scheduler has given an instance up."""
        self.dead.add(name)
        self.table[name].state = InstanceState.GONE
        return self.pool.replace(LostInstance(instance=name, reason=LOST, num_requeued=num_requeued))

    def leave(self, name: str) -> None:
        """The scheduler lets go an instance that has been emptied."""
        self.look(left=(Left(instance=name, reason="empty"),))

    @property
    def serving(self) -> list[str]:
        return sorted(name for name, row in self.table.items() if row.state is InstanceState.SERVING)

    def said(self, text: str) -> list[str]:
        return [note for note in self.notes if text in note]
