"""Episodes over generation actors under a scheduler actor, their environments in a pool of actors of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import ray

from benchmarks.support.actor_pool import ActorPool, ask
from benchmarks.support.workload import Workload
from rlhfspec.actors.workers.environment_actors import EnvironmentActor, EnvironmentPool
from rlhfspec.cluster.run.episodes import Episodes
from rlhfspec.core.config import Config
from rlhfspec.core.errors import WaitTimeout
from rlhfspec.core.records import Completion, SampleKey, SampleRequest
from rlhfspec.policies.reallocation.pool_records import ReallocationPolicy
from rlhfspec.policies.scheduling.events import Alarm, MoveRecord

LIMIT_S = 400.0
ENVIRONMENT_ACTORS = 2


@dataclass(slots=True, kw_only=True)
class Played:
    """What came of the episodes."""

    completions: dict[SampleKey, Completion] = field(default_factory=dict)
    moves: list[MoveRecord] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_kept_tokens: int = 0
    seconds: float = 0.0


def play_over(
    pool: ActorPool,
    workload: Workload,
    config: Config,
    requests: Sequence[SampleRequest],
    *,
    reallocation: ReallocationPolicy | None,
    strike: Callable[[Played], bool] = lambda played: True,
) -> Played:
    """Play all episodes; `strike` is called after each look until it says that it has struck. Raises WaitTimeout."""
    actors = [
        EnvironmentActor.options(num_cpus=0.1, max_concurrency=8).remote(f"env-{i}", config.environment)
        for i in range(ENVIRONMENT_ACTORS)
    ]
    episodes = Episodes(
        config,
        workload.tokenizer,
        EnvironmentPool(actors, config.environment, order_timeout_s=LIMIT_S),
    )
    scheduler = pool.new_scheduler(reallocation, interval_s=0.02)
    played, struck = Played(), False
    began_s = time.perf_counter()
    episodes.begin(requests)
    try:
        while len(played.completions) < len(requests):
            if time.perf_counter() - began_s > LIMIT_S:
                raise WaitTimeout(
                    waiter="the benchmark",
                    waited_for="the instances",
                    order=f"end {len(requests) - len(played.completions)} more episodes",
                    waited_s=LIMIT_S,
                    advice="look at the actors' logs",
                )
            taken = ask(scheduler.take.remote(0.02), "take")
            ended = episodes.advance(
                taken.completions, lambda requests: ask(scheduler.enqueue.remote(requests), "enqueue")
            )
            played.completions.update((completion.key, completion) for _, completion, _ in ended)
            played.moves += taken.moves
            played.alarms += taken.alarms
            played.lost += [lost.instance for lost in taken.lost]
            played.num_prefill_tokens = sum(one.num_prefill_tokens for one in taken.stats.values())
            played.num_kept_tokens = sum(one.num_kept_tokens for one in taken.stats.values())
            struck = struck or strike(played)
    finally:
        for actor in (*actors, scheduler):
            ray.kill(actor)
    played.seconds = time.perf_counter() - began_s
    played.figures = episodes.figures()
    return played
