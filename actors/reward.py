"""Reward pool: actors around one reward function, and the client that sends them whole batches.

A plain pool of actors: measured no slower than Ray Serve on one machine, and it starts in a second
instead of sixteen. Scoring is a pure function of its arguments, so a batch whose actor died is simply
scored again by the restarted one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from actors.remote import Handle, remote
from actors.waiting import get, wait_any
from core.config import RewardConfig
from core.errors import RewardError, WaitTimeout
from core.records import Prompt, Reward
from learning.tasks.base import RewardFunction, build_reward

T = TypeVar("T")


@remote
class RewardActor:
    """Scores batches with the configured reward function."""

    def __init__(self, name: str, config: RewardConfig) -> None:
        self._name = name
        self._config = config
        self._reward: RewardFunction | None = None

    def __repr__(self) -> str:
        return f"RewardActor({self._name})"

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score one response a prompt, in order. No response: only build the reward function.

        Raises RewardError naming the sample, or what building the function raises.
        """
        # Built here and not in the constructor, so that its error arrives as itself and after a restart.
        if self._reward is None:
            self._reward = build_reward(self._config)
        rewards = self._reward.score(prompts, responses) if responses else []
        if len(rewards) != len(responses):
            raise RewardError(
                f"the reward function '{self._config.kind}' was given {len(responses)} responses and "
                f"returned {len(rewards)} rewards; it must return one for each"
            )
        return rewards


@dataclass(frozen=True, slots=True)
class _Batch(Generic[T]):
    items: Sequence[T]
    actor: int
    sent_s: float


class RewardPool(Generic[T]):
    """Sends batches to the least busy actor; `items` come back beside their rewards."""

    def __init__(self, actors: Sequence[Handle], *, timeout_s: float, kind: str = "") -> None:
        """`kind` is reward.kind, for messages."""
        self._actors = list(actors)
        self._kind = kind
        self._timeout_s = timeout_s
        self._in_flight: dict[Any, _Batch[T]] = {}

    @property
    def has_idle(self) -> bool:
        """True when some actor has nothing to score."""
        return min(self._loads()) == 0

    @property
    def num_in_flight(self) -> int:
        """Batches sent and not yet collected."""
        return len(self._in_flight)

    def prove(self, *, timeout_s: float) -> None:
        """Let every actor build its reward function. Raises what building it raises."""
        for name, actor in enumerate(self._actors):
            get(
                actor.score.remote([], []),
                waiter="the loop",
                waited_for=f"reward-{name}",
                order=f"build the reward function {self._kind}".rstrip(),
                timeout_s=timeout_s,
            )

    def submit(self, items: Sequence[T], prompts: Sequence[Prompt], responses: Sequence[str]) -> None:
        """Send one batch; it is scored while the caller goes on."""
        loads = self._loads()
        actor = loads.index(min(loads))
        ref = self._actors[actor].score.remote(prompts, responses)
        self._in_flight[ref] = _Batch(items=items, actor=actor, sent_s=time.monotonic())

    def collect(self, *, wait_s: float) -> list[tuple[T, Reward]]:
        """Return what has been scored, waiting up to `wait_s` for the first batch.

        Raises RewardError or whatever scoring raised; WaitTimeout when a batch takes too long.
        """
        scored: list[tuple[T, Reward]] = []
        for ref in wait_any(list(self._in_flight), timeout_s=wait_s):
            batch = self._in_flight.pop(ref)
            rewards = get(
                ref,
                waiter="the loop",
                waited_for=f"reward-{batch.actor}",
                order="score",
                timeout_s=self._timeout_s,
            )
            scored += zip(batch.items, rewards, strict=True)
        self._refuse_late()
        return scored

    def _loads(self) -> list[int]:
        loads = [0] * len(self._actors)
        for batch in self._in_flight.values():
            loads[batch.actor] += 1
        return loads

    def _refuse_late(self) -> None:
        for batch in self._in_flight.values():
            waited_s = time.monotonic() - batch.sent_s
            if waited_s > self._timeout_s:
                raise WaitTimeout(
                    waiter="the loop",
                    waited_for=f"reward-{batch.actor}",
                    order=f"score {len(batch.items)} responses with {self._kind or 'the reward function'}",
                    waited_s=waited_s,
                    advice="it takes too long or never returns: look at its stack in the Ray dashboard and mend "
                    "the function; if it is only slow, make reward.batch_size smaller, raise "
                    "cluster.reward.num_actors or cluster.order_timeout_s",
                )
