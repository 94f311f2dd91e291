"""A scheduler actor and generation actors that outlive one rollout: the real path, without a learner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import ray

from ...actors.actor_messages import GenerationSpec, Rejoined, SchedulerSettings, Taken
from ...actors.generation.generation_actor import GenerationActor
from ...actors.remote.waiting import get
from ...actors.scheduling.scheduler_actor import SchedulerActor
from ...actors.trace_events import TraceEvent
from ...cluster.ray_start.ray_session import ray_session
from ...cluster.weights.publish import PublishedWeights, publish
from ...core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from ...core.decode_records import GenerationStats
from ...core.errors import WaitTimeout
from ...core.records import Completion, SampleKey, SampleRequest
from ...core.settings.cluster import ClusterConfig
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.drafters.head.published_head import pack_head
from ...engine.weights.chunks import pack_weights
from ...policies.reallocation.pool_records import ReallocationPolicy
from ...policies.scheduling.events import Alarm, MoveRecord
from ...profiles.profile import Profile
from .workload import Workload


@contextmanager
def bench_ray(name: str) -> Iterator[None]:
    """A local Ray without a dashboard."""
    with ray_session(ClusterConfig(dashboard=False), name):
        yield


TIMEOUT_S = 240.0
SLOWEST_TOKEN_S = 0.2
"A rollout may take so long for each token that is asked for: a real model on a busy machine."
POLL_S = 0.1
"As by default (`cluster.poll_interval_s`)."


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """One rollout."""

    completions: dict[SampleKey, Completion]
    seconds: float
    "from the request to the last completion"
    moves: tuple[MoveRecord, ...]
    alarms: tuple[Alarm, ...]
    stats: dict[str, GenerationStats]
    "of this rollout, by instance"
    planning_s: float
    "of the scheduler"
    spans: dict[str, list[TraceEvent]]
    "by instance"
    began_s: float
    "wall clock"


class ActorPool:
    """Generation actors `gen-0`, `gen-1`, .. with the workload's weights. Ray must be running."""

    def __init__(
        self,
        workload: Workload,
        *,
        engine: EngineConfig,
        speculation: SpeculationConfig,
        dtype: str = "float32",
        ranks: Sequence[int] = (1, 1),
        profile: Profile | None = None,
        migration: ReallocationConfig | None = None,
        head: HeadWeights | None = None,
        num_cpus: float = 0.5,
        heartbeat_timeout_s: float = 60.0,
    ) -> None:
        """Start the actors and load the weights; `head` drafts for drafter `head`. Raises WaitTimeout.

        `num_cpus`: of each rank, on paper: pools that stand side by side and a scheduler share what Ray has. `ranks`:
        of each instance.
        """
        self._num_slots, self._num_cpus = engine.max_running_samples, num_cpus
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._spec = GenerationSpec(
            instance="",
            engine=engine,
            speculation=speculation,
            dtype=dtype,
            max_total_tokens=workload.max_total_tokens,
            vocab_size=workload.vocab_size,
            report_interval_s=POLL_S,
            migration=migration,
            profile=profile,
            rank_cpus=num_cpus,
            namespace=ray.get_runtime_context().namespace,
        )
        self.ranks: dict[str, int] = {}
        "of every instance that there was"
        self.handles: dict[str, Any] = {}
        self._running: list[Any] = []
        for num_ranks in ranks:
            self._start(num_ranks)
        models = [pack_weights(workload.target(dtype), name="target", weight_version=0)]
        if speculation.drafter == "model" and speculation.policy != "off":
            models.append(pack_weights(workload.draft(dtype), name="draft", weight_version=0))
        if head is not None:
            models.append(pack_head(head, weight_version=0))
        self._weights = [
            PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))
            for manifest, chunks in models
        ]
        for weights in self._weights:
            publish(weights, self.handles, timeout_s=TIMEOUT_S)
        self._stats: dict[str, GenerationStats] = {}
        self._num_rollouts = 0

    def _start(self, num_ranks: int) -> str:
        name = f"gen-{len(self.ranks)}"
        spec = replace(self._spec, instance=name, num_ranks=num_ranks)
        self.ranks[name] = num_ranks
        self.handles[name] = GenerationActor.options(num_cpus=self._num_cpus).remote(spec)
        self._running.append(self.handles[name].run.remote())
        return name

    def replace(self, lost: str, scheduler: Any) -> None:
        """Put an instance of as many ranks in the place of one that the scheduler has given up. Raises WaitTimeout."""
        del self.handles[lost]
        name = self._start(self.ranks[lost])
        for weights in self._weights:
            publish(weights, {name: self.handles[name]}, timeout_s=TIMEOUT_S)
        ask(scheduler.join.remote(name, self.handles[name], self._num_slots), "join")

    def rollout(
        self,
        requests: Sequence[SampleRequest],
        *,
        reallocation: ReallocationPolicy | None = None,
        binding: str = "pull",
        interval_s: float = 0.1,
        strike: Callable[[Taken, Any, int], bool] = lambda taken, scheduler, num_left: True,
    ) -> RolloutOutcome:
        """Generate all requests under a scheduler of their own. Raises WaitTimeout.

        `strike` is told after each look what came and how many samples are left; once none is, it is asked until it
        says that it is done.
        """
        tokens = sum(request.sampling.max_new_tokens for request in requests)
        limit_s = max(TIMEOUT_S, SLOWEST_TOKEN_S * tokens)
        scheduler = self.new_scheduler(reallocation, binding, interval_s)
        done: dict[SampleKey, Completion] = {}
        moves: list[MoveRecord] = []
        alarms: list[Alarm] = []
        wall_s, began_s = time.time(), time.perf_counter()
        ask(scheduler.enqueue.remote(tuple(requests)), "enqueue")
        deadline_s, ended_s, is_over = time.monotonic() + limit_s, began_s, False
        while len(done) < len(requests) or not is_over:
            if ray.wait([self._polling], timeout=0)[0]:
                ask(self._polling, "poll")
            taken = ask(scheduler.take.remote(0.5), "take")
            ended_s = time.perf_counter()
            done.update((completion.key, completion) for completion in taken.completions)
            moves += taken.moves
            alarms += taken.alarms
            is_over = strike(taken, scheduler, len(requests) - len(done))
            if time.monotonic() > deadline_s:
                raise WaitTimeout(
                    waiter="the benchmark",
                    waited_for="scheduler",
                    order=f"complete {len(requests) - len(done)} more samples",
                    waited_s=limit_s,
                    advice="look at the actors' logs",
                )
        # verdicts and the last statistics are on their way
        time.sleep(0.2)
        taken = ask(scheduler.take.remote(0.0), "take")
        moves += taken.moves
        alarms += taken.alarms
        strike(taken, scheduler, 0)
        ray.kill(scheduler)
        spans = {name: ask(handle.take_spans.remote(), "spans") for name, handle in self.handles.items()}
        return RolloutOutcome(
            completions=done,
            seconds=ended_s - began_s,
            moves=tuple(moves),
            alarms=tuple(alarms),
            stats=self._stats_since(taken.stats),
            planning_s=taken.planning_s,
            spans=spans,
            began_s=wall_s,
        )

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the actors."""
        self.close()

    def close(self) -> None:
        """End the actors."""
        for handle in self.handles.values():
            ray.kill(handle)

    def new_scheduler(
        self,
        reallocation: ReallocationPolicy | None = None,
        binding: str = "pull",
        interval_s: float = 0.1,
    ) -> Any:
        """Start a scheduler over the living instances; the caller ends it."""
        self._num_rollouts += 1
        scheduler = SchedulerActor.options(num_cpus=0.1).remote(
            SchedulerSettings(
                poll_interval_s=POLL_S,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
                order_timeout_s=TIMEOUT_S,
                binding=binding,  # pyright: ignore[reportArgumentType]
                reallocation=reallocation,
                reallocation_interval_s=interval_s,
                term=self._num_rollouts,
            )
        )
        rejoined = tuple(
            Rejoined(
                handle=handle,
                num_slots=self._num_slots,
                held=ask(handle.hold.remote(self._num_rollouts, TIMEOUT_S), "hold"),
            )
            for handle in self.handles.values()
        )
        ask(scheduler.rebuild.remote((), (), rejoined), "rebuild")
        self._polling = scheduler.run.remote()
        return scheduler

    def _stats_since(self, now: Mapping[str, GenerationStats]) -> dict[str, GenerationStats]:
        since = {name: stats - self._stats.get(name, GenerationStats()) for name, stats in now.items()}
        self._stats |= now
        return since


def ask(ref: Any, order: str) -> Any:
    """Wait for an actor's answer. Raises WaitTimeout and what the actor raised."""
    return get(ref, waiter="the benchmark", waited_for="the actors", order=order, timeout_s=TIMEOUT_S)


def generate_on_two_actors(
    workload: Workload,
    requests: Sequence[SampleRequest],
    *,
    dtype: str,
    engine: EngineConfig,
    speculation: SpeculationConfig,
) -> dict[SampleKey, Completion]:
    """Return every completion by key. Ray must be running. Raises WaitTimeout."""
    with ActorPool(workload, dtype=dtype, engine=engine, speculation=speculation) as pool:
        return pool.rollout(requests).completions
