"""From config to bundles and actor options, and their placement.

Every actor has a bundle of one placement group, so a run gets all of its places or none. An actor
holds at least a sliver of a CPU: that is what keeps its node alive under an autoscaler. Several trainers that leave a
part of their GPUs to instances have a whole GPU in a bundle each, and the instances beside them stand in it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...actors.remote.assigned_device import HIDING
from ...core.config import Config, EngineConfig, SpeculationConfig
from ...core.errors import ConfigError, PlacementError
from ...core.settings.cluster import ClusterConfig, GenerationPoolConfig, PoolConfig
from ..ray_start.quiet import quiet_environment

logger = logging.getLogger(__name__)

MIN_CPUS = 0.01
POOL_LABEL = "rlhfspec-pool"
"Of Ray's nodes, where `cluster.pin_pools` is set: the pool that each is for."
_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSlot:
    """One actor's place: its name, its bundle, its threads."""

    name: str
    bundle: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    num_ranks: int = 1
    "actors that stand there, each with so many CPUs and GPUs: an instance's ranks"

    def resources(self) -> dict[str, float]:
        """The bundle in Ray's words."""
        gpus = {"GPU": self.num_gpus * self.num_ranks} if self.num_gpus else {}
        return {"CPU": self.num_cpus * self.num_ranks} | gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All places of a run."""

    scheduler: PlacementSlot
    trainer: tuple[PlacementSlot, ...]
    generation: tuple[PlacementSlot, ...]
    reward: tuple[PlacementSlot, ...]
    environment: tuple[PlacementSlot, ...] = ()
    strategy: str
    placement_timeout_s: float
    pins_pools: bool = False
    num_added: int = 0
    "generation instances that may come during the run, each with a bundle of its own"

    @property
    def pools(self) -> dict[str, tuple[PlacementSlot, ...]]:
        """The places of each pool that has any; the scheduler stands beside the trainers."""
        pools = {
            "generation": self.generation,
            "reward": self.reward,
            "environment": self.environment,
            "trainer": (*self.trainer, self.scheduler),
        }
        return {name: places for name, places in pools.items() if places}

    def label_selectors(self) -> list[dict[str, str]] | None:
        """What labels the node of each bundle must have; None: any node will do."""
        if not self.pins_pools:
            return None
        pool_of = {place.bundle: name for name, places in self.pools.items() for place in places}
        return [{POOL_LABEL: pool_of[bundle]} for bundle in sorted(pool_of)]

    @property
    def places(self) -> tuple[PlacementSlot, ...]:
        """Every place, in the order of the bundles."""
        return tuple(
            sorted(
                (self.scheduler, *self.trainer, *self.generation, *self.reward, *self.environment),
                key=lambda p: p.bundle,
            )
        )

    @property
    def fixed_bundles(self) -> set[int]:
        """Those of all but instances, which find new places by themselves."""
        pools = self.pools.items()
        return {place.bundle for name, places in pools if name != "generation" for place in places}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources of each bundle."""
        found: dict[int, Counter[str]] = {}
        for place in self.places:
            found.setdefault(place.bundle, Counter()).update(place.resources())
        if len(self.trainer) > 1 and 0 < self.trainer[0].num_gpus < 1:
            # whole: Ray adds up what a node has free of its GPUs, and puts on one what fits there
            for place in self.trainer:
                found[place.bundle]["GPU"] = 1
        return [dict(resources) for resources in found.values()]

    def wanted(self) -> dict[str, float]:
        """Resources of all bundles together."""
        total: Counter[str] = Counter()
        for resources in self.bundles:
            total.update(resources)
        return dict(total)

    def added(self, number: int) -> PlacementSlot:
        """The place of a generation instance that is numbered so and comes during the run."""
        return replace(self.generation[0], name=f"gen-{number}", bundle=0)

    def full(self) -> dict[str, float]:
        """Resources of all bundles together once the generation pool is full."""
        total = Counter(self.wanted())
        for number in range(self.num_added):
            total.update(self.added(number).resources())
        return dict(total)

    def describe(self) -> str:
        """One line a pool and one for the whole, for `rlhfspec check`."""
        pools, lines = self.pools | {"trainer": self.trainer, "scheduler": (self.scheduler,)}, list[str]()
        for name, places in pools.items():
            for first in places[:1]:
                of_each = f"{len(places)} x {amounts(first.resources())}, {first.num_threads} thread(s)"
                ranks = (
                    f" in each of {first.num_ranks} ranks (tensor_parallel)" if first.num_ranks > 1 else ""
                )
                lines.append(f"{name + ' ':<11}{of_each}{ranks}")
        trained = {place.bundle for place in self.trainer}
        if beside := sum(place.bundle in trained for place in self.generation):
            lines.append(f"{'beside':<11}{beside} of the instances on the GPUs of trainers")
        lines.append(f"{'total':<11}{amounts(self.wanted())}, {self.strategy}")
        if self.num_added:
            most = len(self.generation) + self.num_added
            lines.append(f"{'full':<11}{amounts(self.full())} with {most} generation instances (max_actors)")
        return "\n".join(lines)


def plan_topology(config: Config) -> Topology:
    """Lay out the pools. Raises ConfigError for what this version cannot run."""
    cluster = config.cluster
    pool = cluster.generation
    _check_trainers(cluster.trainer, config.trainer.minibatch_size)
    _check_ranks(pool, config.engine, config.speculation, trains_head=config.trains_head)
    _check_gpus("trainer", cluster.trainer, "trainer.device", config.trainer.device)
    _check_gpus("generation", pool, "engine.device", config.engine.device)
    if cluster.generation.is_elastic and cluster.placement.startswith("STRICT_"):
        raise ConfigError(
            f"cluster.placement {cluster.placement} is a promise about places reserved together, and instances "
            "between cluster.generation.min_actors and max_actors come one by one; take PACK or SPREAD"
        )
    num_trainers = cluster.trainer.num_actors
    beside = min(num_trainers * _num_beside(cluster), pool.least)
    num_shared = min(beside, num_trainers)  # bundles of a trainer and of instances, the first ones
    bundles = [i % num_trainers if i < beside else num_shared + i - beside for i in range(pool.least)]
    generation = tuple(
        replace(_place(f"gen-{i}", at, pool, config.engine.num_threads), num_ranks=pool.tensor_parallel)
        for i, at in enumerate(bundles)
    )
    first = num_shared + pool.least - beside
    reward = tuple(_place(f"reward-{i}", first + i, cluster.reward) for i in range(config.num_reward_actors))
    of_scheduler = first + len(reward)
    num_environments = cluster.environment.num_actors if config.environment.kind else 0
    environment = tuple(
        _place(f"environment-{i}", of_scheduler + 1 + i, cluster.environment) for i in range(num_environments)
    )
    # last, but for those beside instances: an evaluation leaves them out
    last = of_scheduler + 1 + num_environments - num_shared
    trainer = tuple(
        _place(
            "trainer" if num_trainers == 1 else f"trainer-{i}",
            i if i < num_shared else last + i,
            cluster.trainer,
            config.trainer.num_threads,
        )
        for i in range(num_trainers)
    )
    return Topology(
        scheduler=_place("scheduler", of_scheduler, PoolConfig(num_cpus=cluster.scheduler_num_cpus)),
        trainer=trainer,
        generation=generation,
        reward=reward,
        environment=environment,
        strategy=cluster.placement,
        placement_timeout_s=cluster.placement_timeout_s,
        pins_pools=cluster.pin_pools,
        num_added=cluster.generation.most - cluster.generation.least,
    )


def require_machine(topology: Topology, *, num_cpus: float | None, num_gpus: float) -> None:
    """Require that one machine can hold all places; of `num_cpus` None nothing is known.

    Raises PlacementError naming what is missing.
    """
    wanted, have = topology.wanted(), ({} if num_cpus is None else {"CPU": num_cpus}) | {"GPU": num_gpus}
    missing = gaps({name: amount for name, amount in wanted.items() if name in have}, have)
    if missing:
        raise PlacementError(
            f"the run cannot be placed on this machine: it wants {amounts(wanted)}, the machine has "
            f"{amounts(have)}; missing: {amounts(missing)}; lower cluster.generation.num_actors, or num_actors, "
            "num_cpus, num_gpus of another pool of cluster, or join a larger cluster with cluster.address"
        )
    if (needed := _num_gpus(topology)) > num_gpus:
        raise PlacementError(
            f"the run cannot be placed on this machine: shares of GPUs leave gaps and take {needed} whole ones, the "
            f"machine has {num_gpus:g}; let cluster.trainer.num_gpus and cluster.generation.num_gpus add up to 1"
        )
    if topology.pins_pools:
        raise PlacementError(
            f"the run cannot be placed on this machine: cluster.pin_pools wants nodes with the Ray label {POOL_LABEL}, "
            "which a private Ray has not; take it out, or join a cluster with cluster.address"
        )
    if topology.strategy == "STRICT_SPREAD" and len(topology.bundles) > 1:
        raise PlacementError(
            f"the run cannot be placed on this machine: cluster.placement STRICT_SPREAD wants {len(topology.bundles)} "
            "machines; use PACK, or join a cluster with cluster.address"
        )


def _num_gpus(topology: Topology) -> int:
    """GPUs that all bundles take together, the largest shares placed first, each where it leaves least."""
    free: list[float] = []
    for share in sorted((each.get("GPU", 0.0) for each in topology.bundles), reverse=True):
        if share >= 1:
            free += [0.0] * int(share)
        elif share:
            fitting = [i for i, left in enumerate(free) if left > share - _SLACK]
            at = min(fitting, key=free.__getitem__, default=len(free))
            free += [1.0] * (at == len(free))
            free[at] -= share
    return len(free)


def place(
    topology: Topology,
    *,
    is_local: bool,
    patience_s: float = 0.0,
    note: Callable[[str], None] = logger.warning,
) -> PlacementGroup:
    """Reserve all bundles.

    A local cluster cannot grow, so what it lacks is said at once; elsewhere an autoscaler gets
    `placement_timeout_s`, and then, `note` being told what is missing, `patience_s` more.
    Raises PlacementError naming what is missing.
    """
    if is_local and gaps(topology.wanted(), ray.cluster_resources()):
        raise PlacementError(_explain(topology, waited_s=0.0))
    began_s = time.monotonic()
    group = placement_group(
        topology.bundles,
        strategy=topology.strategy,
        bundle_label_selector=topology.label_selectors(),  # type: ignore[arg-type]  # None is its default
    )
    is_placed = group.wait(topology.placement_timeout_s)
    if not is_placed and patience_s:
        note(f"{_explain(topology, waited_s=time.monotonic() - began_s)}; waiting {patience_s:.0f} s more")
        is_placed = group.wait(patience_s)
    if not is_placed:
        message = _explain(topology, waited_s=time.monotonic() - began_s)
        remove_placement_group(group)
        raise PlacementError(message)
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementContext:
    """Where a run's actors stand: their bundles and their namespace."""

    group: PlacementGroup
    namespace: str
    environment: Mapping[str, str] = field(default_factory=dict)
    "variables that tell actors their run (`actors.remote.actor_start`)"


def actor_options(place: PlacementSlot, context: PlacementContext) -> dict[str, Any]:
    """Options for `Actor.options(...)`: name, bundle, threads, silenced libraries."""
    threads = str(place.num_threads)
    return {
        "name": place.name,
        "namespace": context.namespace,
        "num_cpus": place.num_cpus,
        "num_gpus": place.num_gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=context.group, placement_group_bundle_index=place.bundle
        ),
        "runtime_env": {
            "env_vars": quiet_environment()
            | HIDING
            | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
            | dict(context.environment)
        },
    }


def _place(name: str, bundle: int, pool: PoolConfig, num_threads: int = 1) -> PlacementSlot:
    num_cpus = max(pool.num_cpus, MIN_CPUS)
    return PlacementSlot(
        name=name, bundle=bundle, num_cpus=num_cpus, num_gpus=pool.num_gpus, num_threads=num_threads
    )


def _check_ranks(
    pool: GenerationPoolConfig, engine: EngineConfig, speculation: SpeculationConfig, *, trains_head: bool
) -> None:
    """Raise ConfigError for what an instance of several ranks does not do yet."""
    num_ranks, on_gpus = pool.tensor_parallel, pool.num_gpus > 0
    if num_ranks == 1:
        return
    gpus = f"cluster.generation.num_gpus={pool.num_gpus:g}, expected 0 or 1, which each rank has"
    wrong = {
        gpus: pool.num_gpus not in (0, 1),
        f"engine.device={engine.device}, expected {'auto or cuda' if on_gpus else 'auto or cpu'}": engine.device
        == ("cpu" if on_gpus else "cuda"),
        f"engine.num_threads={engine.num_threads}, expected 1": engine.num_threads > 1,
        "engine.forward=stock, expected auto": engine.forward == "stock",
        f"engine.attention={engine.attention}, expected auto": not on_gpus
        and engine.attention not in ("auto", "ordered"),
        "engine.numerics=invariant on GPUs, whose products have no order of their own": on_gpus
        and engine.numerics == "invariant",
        "speculation.policy=goodput on GPUs, whose profile no group of them can measure yet": on_gpus
        and speculation.needs_profile,
        "speculation.drafter=mtp, whose layer needs the whole output matrix": speculation.drafter == "mtp",
        "drafter_training.spot other than off, which learns from the whole output matrix": trains_head,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"cluster.generation.tensor_parallel={num_ranks} does not go with {what}; change that, or set "
                "tensor_parallel=1"
            )


def _num_beside(cluster: ClusterConfig) -> int:
    """Instances that the rest of each trainer's GPU has room for, where several trainers have a part of one each."""
    trainer, pool = cluster.trainer, cluster.generation
    if trainer.num_actors == 1 or not 0 < trainer.num_gpus < 1 or not pool.num_gpus or cluster.pin_pools:
        return 0
    return int((1 - trainer.num_gpus) / pool.num_gpus + _SLACK) if pool.tensor_parallel == 1 else 0


def _check_trainers(pool: PoolConfig, minibatch_size: int) -> None:
    """Raise ConfigError where several trainers could not learn as one."""
    if pool.num_actors > minibatch_size:
        raise ConfigError(
            f"cluster.trainer.num_actors is {pool.num_actors}, but a step of the optimizer has "
            f"trainer.minibatch_size {minibatch_size} responses to share out, so some trainers would "
            "never learn; raise trainer.minibatch_size or take fewer trainers"
        )


def _check_gpus(name: str, pool: PoolConfig, device_key: str, device: str) -> None:
    """Raise ConfigError where GPUs are asked for that nobody would use."""
    asked = f"cluster.{name}.num_gpus is {pool.num_gpus:g}"
    if pool.num_gpus > 1:
        more = " or tensor_parallel" if name == "generation" else ""
        raise ConfigError(
            f"{asked}, and each actor uses one GPU; expected at most 1: for more set cluster.{name}.num_actors{more}"
        )
    if pool.num_gpus and device == "cpu":
        raise ConfigError(
            f"{asked} and {device_key} is cpu, so nobody would use it; set 0, or {device_key}=auto"
        )


def gaps(wanted: Mapping[str, float], have: Mapping[str, float]) -> dict[str, float]:
    """What is missing of each resource."""
    found = {name: amount - have.get(name, 0.0) for name, amount in wanted.items()}
    return {name: gap for name, gap in found.items() if gap > _SLACK}


def _explain(topology: Topology, *, waited_s: float) -> str:
    wanted, total, free = topology.wanted(), ray.cluster_resources(), ray.available_resources()
    missing = gaps(wanted, free)
    gap = f"missing: {amounts(missing)}" if missing else "enough in all, but not on the right nodes"
    if topology.pins_pools:
        labelled = {node["Labels"].get(POOL_LABEL) for node in ray.nodes() if node["Alive"]}
        unmet = [name for name in topology.pools if name not in labelled]
        if unmet:
            gap += f"; no node has the label {POOL_LABEL} for {', '.join(unmet)} (cluster.pin_pools)"
    largest = max(topology.places, key=lambda p: (p.num_gpus, p.num_cpus))
    have = {name: total.get(name, 0.0) for name in wanted}
    idle = {name: free.get(name, 0.0) for name in wanted}
    return (
        f"the run cannot be placed (waited {waited_s:.0f} s): it wants {amounts(wanted)} in "
        f"{len(topology.bundles)} bundles (largest: {largest.name} with {amounts(largest.resources())}, "
        f"strategy {topology.strategy}), the cluster has {amounts(have)}, of which {amounts(idle)} free; "
        f"{gap}; lower cluster.generation.num_actors, or num_actors, num_cpus, num_gpus of another pool of cluster, or "
        "add nodes"
    )


def amounts(resources: Mapping[str, float]) -> str:
    """Resources in words."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
