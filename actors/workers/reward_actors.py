"""Reward pool: actors around one reward function, and the client that sends them whole batches.

A plain pool of actors: measured no slower than Ray Serve on one machine, and it starts in a second
instead of sixteen. Scoring is a pure function of its arguments, so a batch whose actor died is simply
scored again by the one that takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray

from ...core.config import RewardConfig
from ...core.named_code import import_from_too
from ...core.records import Prompt, ResponseFacts, Reward, Unscored
from ...core.settings.reward import Scorer
from ...learning.rewards.reward_function import build_reward
from ...learning.rewards.reward_stage import RewardStage
from ...learning.rewards.score_request import RewardSource
from ..remote.actor_start import begin_actor, set_heap_aside
from ..remote.assigned_device import reward_device
from ..remote.remote import Handle, remote
from ..remote.stateless_pool import HEARTBEAT_S, PoolKind, Replace, StatelessPool

T = TypeVar("T")


@remote(concurrency_groups={"control": 1})
class RewardActor:
    """Scores batches with the configured reward function, in a thread of its own that is always the same."""

    def __init__(
        self,
        name: str,
        config: RewardConfig,
        caller_dir: str | None = None,
        template_time: str | None = None,
    ) -> None:
        """`caller_dir`: the driver's folder, for code of the user's; `template_time`: run.template_time."""
        begin_actor(name)
        import_from_too(caller_dir)
        self._name = name
        self._config, self._template_time = config, template_time
        self._reward: RewardStage | None = None

    def __repr__(self) -> str:
        return f"RewardActor({vars(self).get('_name', 'not made')})"

    @ray.method(concurrency_group="control")
    def alive(self) -> None:
        """Answer at once, whatever is being scored."""

    def score(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        facts: Sequence[ResponseFacts] | None = None,
    ) -> list[Reward | Unscored]:
        """Score one response a prompt, in order. No response: only build the reward function.

        Raises RewardError naming the sample, where `reward.on_error` says so, or what building the function raises.
        """
        # Built here and not in the constructor, so that its error arrives as itself and after a restart.
        if self._reward is None:
            self._reward = build_reward(
                self._config,
                device=reward_device(),
                served=self._served,
                fields=None,
                template_time=self._template_time,
            )
            set_heap_aside()
        return self._reward.score_each(prompts, responses, facts) if responses else []

    def _served(self, scorer: Scorer) -> RewardSource:
        # imported here: Ray Serve takes its time, and few rewards are served
        from ..reward_server.reward_client import ServedReward

        return ServedReward(scorer, self._config.server)


@dataclass(frozen=True, slots=True)
class _Batch(Generic[T]):
    items: Sequence[T]
    prompts: Sequence[Prompt]
    responses: Sequence[str]
    facts: Sequence[ResponseFacts] | None


class RewardPool(Generic[T]):
    """Sends batches to the least busy actor; `items` come back beside their rewards."""

    def __init__(
        self,
        actors: Sequence[Handle],
        *,
        timeout_s: float,
        heartbeat_timeout_s: float = HEARTBEAT_S,
        kind: str = "",
        make: Replace | None = None,
        max_restarts: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """A pool around living actors: `reward-0`, `reward-1`, ... in this order.

        Args:
            actors: each a `RewardActor`.
            timeout_s: how long an actor may go without an answer.
            heartbeat_timeout_s: how long one that scores may give no sign of life.
            kind: `reward.kind`, for messages.
            make: makes the n-th replacement (from 1) of the i-th actor; None replaces none.
            max_restarts: replacements of each actor within an hour.
            note: told of every replacement, one line.
        """
        self._kind = kind

        def num_samples(batches: Sequence[_Batch[T]]) -> int:
            return sum(len(batch.items) for batch in batches)

        pool_kind: PoolKind[_Batch[T]] = PoolKind(
            stem="reward",
            call=lambda actor, batch: actor.score.remote(batch.prompts, batch.responses, batch.facts),
            order=lambda batch: f"score {len(batch.items)} responses with {kind or 'the reward function'}",
            timeout_s=timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            again=lambda batches: f"scores {num_samples(batches)} samples again",
            culprit="the reward function",
            late_advice="it takes too long or never returns: look at its stack in the Ray dashboard and fix "
            "the function; if it is only slow, make reward.batch_size smaller, raise "
            "cluster.reward.num_actors or cluster.order_timeout_s",
        )
        self._actors = StatelessPool(actors, pool_kind, make=make, max_restarts=max_restarts, note=note)
        self._skipped: list[tuple[T, Unscored]] = []

    @property
    def num_idle(self) -> int:
        """Actors that have nothing to score."""
        return self._actors.loads().count(0)

    def check(self, *, timeout_s: float) -> None:
        """Let every actor build its reward function. Raises what building it raises."""
        order = f"build the reward function {self._kind}".rstrip()
        self._actors.check(lambda actor: actor.score.remote([], []), order=order, timeout_s=timeout_s)

    def submit(
        self,
        items: Sequence[T],
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        facts: Sequence[ResponseFacts] | None = None,
    ) -> None:
        """Send one batch; it is scored while the caller goes on. Shaping needs `facts`."""
        loads = self._actors.loads()
        self._actors.ask(loads.index(min(loads)), _Batch(items, prompts, responses, facts))

    def collect(self, *, wait_s: float) -> list[tuple[T, Reward]]:
        """Return what has been scored, waiting up to `wait_s` for the first batch; see `skipped` too.

        Raises RewardError or whatever scoring raised; WaitTimeout when a batch takes too long; ActorDied
        when an actor died or froze more often than it may be replaced.
        """
        scored: list[tuple[T, Reward]] = []
        for batch, rewards in self._actors.answers(wait_s=wait_s):
            for item, reward in zip(batch.items, rewards, strict=True):
                if isinstance(reward, Reward):
                    scored.append((item, reward))
                else:
                    self._skipped.append((item, reward))
        return scored

    def skipped(self) -> list[tuple[T, Unscored]]:
        """What could not be scored since the last call (`reward.on_error: skip`)."""
        skipped, self._skipped = self._skipped, []
        return skipped
