"""Ray: where, what each pool takes, and how long anything may take to answer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .section import Seconds, Section

MAX_ACTORS = 4096
LEAST_HEARTBEATS = 5
"So many must fit in `cluster.heartbeat_timeout_s`: one that comes late is no death. Actors are asked once a second."


class PoolConfig(Section):
    """One actor pool: how many actors, and what each takes. Fractions of a CPU are allowed."""

    num_actors: int = Field(default=1, ge=1, le=MAX_ACTORS)
    num_cpus: float = Field(default=0.5, ge=0.0)
    num_gpus: float = Field(default=0.0, ge=0.0)


class GenerationPoolConfig(PoolConfig):
    """The generation instances; between `min_actors` and `max_actors` the pool grows and shrinks during a run."""

    num_actors: int = Field(default=2, ge=1, le=MAX_ACTORS)
    "at the start"
    min_actors: int | None = Field(default=None, ge=1, le=MAX_ACTORS)
    "a run starts when so many have a place; null: num_actors"
    max_actors: int | None = Field(default=None, ge=1, le=MAX_ACTORS)
    "null: num_actors"
    tensor_parallel: Literal[1, 2, 4] = 1
    "ranks of an instance, num_cpus and num_gpus each, on one machine; on CPUs tokens do not depend on it"
    idle_timeout_s: Seconds = 120.0
    "an instance above min_actors that has had nothing to do for so long leaves"

    @property
    def least(self) -> int:
        """Instances that the run always has."""
        return self.num_actors if self.min_actors is None else self.min_actors

    @property
    def most(self) -> int:
        """Instances that the run has at most."""
        return self.num_actors if self.max_actors is None else self.max_actors

    @property
    def is_elastic(self) -> bool:
        """Whether the pool may change its size."""
        return self.least < self.most

    @model_validator(mode="after")
    def _start_between(self) -> Self:
        if not self.least <= self.num_actors <= self.most:
            raise ValueError(
                f"expected min_actors <= num_actors <= max_actors, got {self.least}, {self.num_actors}, {self.most}; "
                "num_actors is what the pool starts with"
            )
        return self


class RewardPoolConfig(PoolConfig):
    """The reward actors."""

    num_cpus: float = Field(default=0.25, ge=0.0)


class EnvironmentPoolConfig(PoolConfig):
    """The actors that run environments, where `environment.kind` names one."""

    num_cpus: float = Field(default=0.25, ge=0.0)


class PublicationConfig(Section):
    """How new weights of the target travel from the trainer to the instances."""

    transport: Literal["auto", "broadcast", "nccl", "object_store"] = "auto"
    "broadcast: a process group (Gloo); nccl: that over NCCL where all have GPUs of their own; auto: nccl there, else "
    "broadcast on several nodes, else object_store. Instances that all sit on trainers' GPUs read the weights there, "
    "unless object_store is named"


class ClusterConfig(Section):
    """Ray: where, what each pool takes, and how long anything may take to answer."""

    address: str | None = None
    "`auto` or an address joins a running cluster; null: RAY_ADDRESS if set, else a local one"
    dashboard: bool = True
    dashboard_port: int | None = None
    "null: a free one"
    object_store_bytes: int | None = None
    "null: what the run needs, two versions of its weights where it learns and samples at once (local cluster only)"
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    pin_pools: bool = False
    "only on nodes whose Ray label `rlhfspec-pool` names the pool, as in `deploy/kubernetes`"
    generation: GenerationPoolConfig = GenerationPoolConfig()
    reward: RewardPoolConfig = RewardPoolConfig()
    environment: EnvironmentPoolConfig = EnvironmentPoolConfig()
    trainer: PoolConfig = PoolConfig()
    publication: PublicationConfig = PublicationConfig()
    scheduler_num_cpus: float = Field(default=0.1, ge=0.0)
    placement_timeout_s: Seconds = 30.0
    start_timeout_s: Annotated[Seconds, Field(ge=1.0)] = 900.0
    "an actor's start: torch imported, trainers joined, models built; for one that is frozen, not one that is slow"
    poll_interval_s: Seconds = 0.1
    heartbeat_timeout_s: Annotated[Seconds, Field(ge=float(LEAST_HEARTBEATS))] = 60.0
    "whoever is at work (instance, trainer, reward or environment actor) and gives no sign of life for so long is "
    "lost; at least 5 times poll_interval_s"
    order_timeout_s: Annotated[Seconds, Field(ge=1.0)] = 300.0
    "weight loads, scoring; an update in which no forward ends for so long"
    max_instance_restarts: int = Field(default=3, ge=0)
    "within an hour: lost instances that are replaced; counted for each reward and environment actor too"
    no_instance_timeout_s: Seconds = 600.0
    "a run whose generation instances are all lost waits so long for one, then ends; it can be resumed"
    max_trainer_restarts: int = Field(default=3, ge=0)
    "within an hour, and from one state: trainers that die or freeze are started anew, all together, from the run's "
    "last state"
    max_scheduler_restarts: int = Field(default=3, ge=0)
    "within an hour; the state comes from the instances and the loop"

    @property
    def is_on_gpus(self) -> bool:
        """Whether trainer and instances both have GPUs."""
        return bool(self.trainer.num_gpus and self.generation.num_gpus)

    def silence_limit_s(self, call_timeout_s: float) -> float:
        """For how long an actor may be silent whose code, one call of which may take so long, is the user's.

        A call that never lets go of Python's lock (a regular expression, an extension) lets nobody else answer.
        """
        return max(self.heartbeat_timeout_s, call_timeout_s + LEAST_HEARTBEATS)

    @model_validator(mode="after")
    def _hears_of_the_living(self) -> Self:
        if self.heartbeat_timeout_s < LEAST_HEARTBEATS * self.poll_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s {self.heartbeat_timeout_s:g} has no room for {LEAST_HEARTBEATS} answers of "
                f"instances that are asked every {self.poll_interval_s:g} s (poll_interval_s): living ones would be "
                "taken for lost; raise the one or lower the other"
            )
        return self


def require_publication(publication: PublicationConfig, max_staleness: int) -> None:
    """Raise ValueError where an instance that joins could not be given the version that the others decode from."""
    if max_staleness and publication.transport in ("broadcast", "nccl"):
        raise ValueError(
            f"cluster.publication.transport is {publication.transport} and rollout.max_staleness above 0: an instance "
            "that joins while the trainer is ahead could not be given the version that the others decode from, so "
            "weights travel by the object store there; set transport: auto or object_store"
        )
