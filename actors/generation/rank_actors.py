"""The other ranks of an instance: Ray actors that the leader starts beside itself, and that end with it.

They are of the leader's own bundle, so of its machine: the ranks share one cache's memory. An instance is lost as one:
where a follower dies the leader ends too, where the leader dies Ray ends the actors that it owns.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhfspec.actors.actor_messages import GenerationSpec
from rlhfspec.actors.waiting.actor_start import begin_actor
from rlhfspec.actors.waiting.remote import Handle, remote
from rlhfspec.core.errors import WaitTimeout

if TYPE_CHECKING:
    from rlhfspec.engine.group.ranks import GroupRanks

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 300.0
"Until all ranks of an instance have met; Ray may wait for room first."
STEP_TIMEOUT_S = 120.0
"For a rank's answer within a step."


@remote(max_restarts=0)
class RankActor:
    """A rank that follows: see `engine.group.follower`."""

    def __init__(self, instance: str, rank: int) -> None:
        self._instance = instance
        begin_actor(f"{instance}-rank-{rank}")

    def follow(self, folder: str, rank: int, num_ranks: int) -> None:
        """Compute this rank's share until the leader says stop. Raises GroupError: the leader is gone."""
        from rlhfspec.engine.group.follower import Follower

        ranks = _join(folder, rank, num_ranks, instance=self._instance)
        try:
            Follower(ranks).follow()
        finally:
            # whatever ended it: the others see closed sockets, and wait no longer
            ranks.close()


class RankActors:
    """The leader's side: the actors, and its own end of the group. Used by one thread."""

    def __init__(self, spec: GenerationSpec) -> None:
        """Start the actors and wait until all have met. Raises WaitTimeout, naming who did not come."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{spec.instance}-ranks-"))
        folder = str(self._folder)
        numbers = range(1, spec.num_ranks)
        self._actors: list[Handle] = [_started(spec, rank) for rank in numbers]
        self._following = [
            actor.follow.remote(folder, rank, spec.num_ranks)
            for actor, rank in zip(self._actors, numbers, strict=True)
        ]
        try:
            self.ranks: GroupRanks = _join(folder, 0, spec.num_ranks, instance=spec.instance)
        except OSError as error:
            self._end()
            raise WaitTimeout(
                waiter=spec.instance,
                waited_for=f"{len(numbers)} more rank(s) of it",
                order="meet",
                waited_s=START_TIMEOUT_S,
                advice="look at their logs, and whether its node has room for cluster.generation.num_cpus times "
                f"{spec.num_ranks}: {str(error).splitlines()[0]}",
            ) from error
        self.ranks.on_lost = _end_process
        # an idle leader sends nothing, so no socket would tell it
        Thread(target=self._watch, name="ranks", daemon=True).start()

    def close(self) -> None:
        """Let the other ranks end; those of a group that is broken are ended."""
        from rlhfspec.engine.group.ranks import GroupError

        self.ranks.on_lost = None
        try:
            self.ranks.order("stop")
            ray.wait(self._following, num_returns=len(self._following), timeout=5.0)
        except GroupError:
            pass
        self.ranks.close()
        self._end()

    def _watch(self) -> None:
        """Wait until a rank has ended: the leader ends too, unless it has let them end."""
        (ended, *_), _ = ray.wait(self._following, num_returns=1)
        if self.ranks.on_lost is not None:
            rank, count = 1 + self._following.index(ended), 1 + len(self._following)
            _end_process(f"rank {rank} of {count} has ended, see its log; the instance is lost")

    def _end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        shutil.rmtree(self._folder, ignore_errors=True)


def _end_process(lost: object) -> None:
    """A leader without its ranks has nothing to go on with: whoever waits for it must see it dead, and replace it."""
    logger.error("%s", lost)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(1)


def _started(spec: GenerationSpec, rank: int) -> Handle:
    """A rank's actor in the leader's bundle; its environment is the leader's."""
    name = f"{spec.instance}-rank-{rank}"
    options: dict[str, Any] = {"name": name, "namespace": spec.namespace, "num_cpus": spec.rank_cpus}
    group = ray.util.get_current_placement_group()
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=spec.bundle
        )
    actor: Any = RankActor
    return actor.options(**options).remote(spec.instance, rank)


def _join(folder: str, rank: int, num_ranks: int, *, instance: str) -> GroupRanks:
    """Meet the others. Raises TimeoutError."""
    # the driver and the scheduler import this module, and have no use for torch
    from rlhfspec.engine.group.ranks import joined

    return joined(
        folder,
        rank,
        num_ranks,
        instance=instance,
        start_timeout_s=START_TIMEOUT_S,
        step_timeout_s=STEP_TIMEOUT_S,
    )
