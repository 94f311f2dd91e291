"""Reward pool: actors around one reward function, and the client that sends them whole batches.

A plain pool of actors: measured no slower than Ray Serve on one machine, and it starts in a second
instead of sixteen. Scoring is a pure function of its arguments, so a batch whose actor died is simply
scored again by the one that takes its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from actors.ray_utils.assigned_device import assigned_gpus, resolve_device
from actors.ray_utils.remote import Handle, remote
from actors.ray_utils.waiting import ActorDied, get, wait_any
from actors.ray_utils.watch import OpenWait
from core.config import RewardConfig
from core.errors import WaitTimeout
from core.records import Prompt, ResponseFacts, Reward, Unscored
from core.settings.reward import Scorer
from learning.rewards.reward_function import build_reward
from learning.rewards.reward_stage import RewardStage
from learning.rewards.score_request import RewardSource

T = TypeVar("T")


@remote
class RewardActor:
    """Scores batches with the configured reward function."""

    def __init__(self, name: str, config: RewardConfig, caller_dir: str | None = None) -> None:
        """`caller_dir`: the driver's folder, importable here where it exists; last, so that it shadows nothing."""
        if caller_dir is not None and caller_dir not in sys.path:
            sys.path.append(caller_dir)
        self._name = name
        self._config = config
        self._reward: RewardStage | None = None

    def __repr__(self) -> str:
        return f"RewardActor({self._name})"

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
            self._reward = build_reward(self._config, device=own_device(), served=self._served, fields=None)
        return self._reward.score_each(prompts, responses, facts) if responses else []

    def _served(self, scorer: Scorer) -> RewardSource:
        # imported here: Ray Serve takes its time, and few rewards are served
        from actors.serving.reward_client import ServedReward

        return ServedReward(scorer, self._config.server)


def own_device() -> str:
    """The GPU that Ray assigned (cluster.reward.num_gpus), else the CPU. Raises ConfigError."""
    gpus = assigned_gpus()
    if not gpus:
        return "cpu"
    return str(resolve_device("auto", assigned=gpus, key="reward.kind", pool="cluster.reward"))


@dataclass(frozen=True, slots=True)
class _Batch(Generic[T]):
    items: Sequence[T]
    prompts: Sequence[Prompt]
    responses: Sequence[str]
    facts: Sequence[ResponseFacts] | None
    actor: int
    name: str
    handle: Handle
    wait: OpenWait


class RewardPool(Generic[T]):
    """Sends batches to the least busy actor; `items` come back beside their rewards."""

    def __init__(
        self,
        actors: Sequence[Handle],
        *,
        timeout_s: float,
        kind: str = "",
        make: Callable[[int, int], Handle] | None = None,
        max_restarts: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """A pool around living actors.

        Args:
            actors: they are called reward-0, reward-1, ... in this order, replacements reward-0-r1 and so on.
            timeout_s: how long an actor may go without an answer.
            kind: `reward.kind`, for messages.
            make: makes the n-th replacement (from 1) of the i-th actor; None replaces none.
            max_restarts: replacements of each actor.
            note: told of every replacement, one line.
        """
        self._actors = list(actors)
        self._kind = kind
        self._timeout_s = timeout_s
        self._make = make
        self._max_restarts = max_restarts if make is not None else 0
        self._note = note
        self._num_restarts = [0] * len(self._actors)
        self._names = [f"reward-{actor}" for actor in range(len(self._actors))]
        self._in_flight: dict[Any, _Batch[T]] = {}
        self._skipped: list[tuple[T, Unscored]] = []

    @property
    def has_idle(self) -> bool:
        """True when some actor has nothing to score."""
        return min(self._loads()) == 0

    def prove(self, *, timeout_s: float) -> None:
        """Let every actor build its reward function. Raises what building it raises."""
        for name, actor in zip(self._names, self._actors, strict=True):
            get(
                actor.score.remote([], []),
                waiter="the loop",
                waited_for=name,
                order=f"build the reward function {self._kind}".rstrip(),
                timeout_s=timeout_s,
            )

    def submit(
        self,
        items: Sequence[T],
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        facts: Sequence[ResponseFacts] | None = None,
    ) -> None:
        """Send one batch; it is scored while the caller goes on. Shaping needs `facts`."""
        loads = self._loads()
        self._send(loads.index(min(loads)), items, prompts, responses, facts)

    def collect(self, *, wait_s: float) -> list[tuple[T, Reward]]:
        """Return what has been scored, waiting up to `wait_s` for the first batch; see `skipped` too.

        Raises RewardError or whatever scoring raised; WaitTimeout when a batch takes too long; ActorDied
        when an actor died more often than it may be replaced.
        """
        scored: list[tuple[T, Reward]] = []
        for ref in wait_any(list(self._in_flight), timeout_s=wait_s):
            batch = self._in_flight.pop(ref)
            try:
                rewards = get(
                    ref,
                    waiter="the loop",
                    waited_for=batch.name,
                    order="score",
                    timeout_s=self._timeout_s,
                )
            except ActorDied as death:
                self._replace(batch, death)
                continue
            batch.wait.answered()
            for other in self._in_flight.values():
                if other.actor == batch.actor:
                    other.wait.restart()
            for item, reward in zip(batch.items, rewards, strict=True):
                if isinstance(reward, Reward):
                    scored.append((item, reward))
                else:
                    self._skipped.append((item, reward))
        self._refuse_late()
        return scored

    def skipped(self) -> list[tuple[T, Unscored]]:
        """What could not be scored since the last call (`reward.on_error: skip`)."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def _send(
        self,
        actor: int,
        items: Sequence[T],
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        facts: Sequence[ResponseFacts] | None,
    ) -> None:
        handle = self._actors[actor]
        ref = handle.score.remote(prompts, responses, facts)
        wait = OpenWait(
            waiter="the loop",
            waited_for=self._names[actor],
            order=f"score {len(items)} responses",
            timeout_s=self._timeout_s,
        )
        self._in_flight[ref] = _Batch(
            items, prompts, responses, facts, actor, self._names[actor], handle, wait
        )

    def _replace(self, batch: _Batch[T], death: ActorDied) -> None:
        """Let a new actor score what the dead one had; its other batches come back here one by one."""
        if batch.handle is self._actors[batch.actor]:
            number = self._num_restarts[batch.actor]
            if self._make is None or number == self._max_restarts:
                raise ActorDied(
                    f"{death}; all {self._max_restarts} replacements of reward-{batch.actor} are used up; look whether "
                    "the reward function ends its process or needs more memory, or raise cluster.max_instance_restarts"
                ) from None
            self._num_restarts[batch.actor] = number + 1
            self._names[batch.actor] = f"reward-{batch.actor}-r{number + 1}"
            self._actors[batch.actor] = self._make(batch.actor, number + 1)
            num_waiting = len(batch.items) + sum(
                len(other.items) for other in self._in_flight.values() if other.handle is batch.handle
            )
            self._note(
                f"{death}; {self._names[batch.actor]} takes its place and scores {num_waiting} samples again"
            )
        self._send(batch.actor, batch.items, batch.prompts, batch.responses, batch.facts)

    def _loads(self) -> list[int]:
        loads = [0] * len(self._actors)
        for batch in self._in_flight.values():
            loads[batch.actor] += 1
        return loads

    def _refuse_late(self) -> None:
        """Miss what an actor was asked first and has not answered. Raises WaitTimeout."""
        for batch in {batch.actor: batch for batch in reversed(self._in_flight.values())}.values():
            batch.wait.look()
            if batch.wait.left_s == 0.0:
                raise WaitTimeout(
                    waiter="the loop",
                    waited_for=batch.name,
                    order=f"score {len(batch.items)} responses with {self._kind or 'the reward function'}",
                    waited_s=batch.wait.waited_s,
                    advice="it takes too long or never returns: look at its stack in the Ray dashboard and mend "
                    "the function; if it is only slow, make reward.batch_size smaller, raise "
                    "cluster.reward.num_actors or cluster.order_timeout_s",
                )
