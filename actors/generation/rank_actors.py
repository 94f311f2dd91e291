"""The other ranks of an instance: Ray actors that the leader starts beside itself, and that end with it.

They are of the leader's own bundle, so of its machine, and have a GPU each where the leader has one. An instance is
lost as one: where a follower dies the leader ends too, where the leader dies Ray ends the actors that it owns.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...core.errors import InstanceLost, PlacementError, WaitTimeout
from ..actor_messages import GenerationSpec
from ..remote.actor_start import begin_actor
from ..remote.assigned_device import INSTANCE_ADVICE, assigned_gpus, resolve_device, take_gpu_share
from ..remote.deaths import DEATHS, cause_of
from ..remote.remote import Handle, remote

if TYPE_CHECKING:
    from ...engine.group.ranks import GroupRanks

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 240.0
"Until all ranks of an instance have met; less than the default of `cluster.order_timeout_s`."
STEP_TIMEOUT_S = 45.0
"For a rank's answer within a step; less than the default of `cluster.heartbeat_timeout_s`, so that it is named."
_LAST_WORDS_S = 5.0
"For Ray to say why a rank has ended."
_HEARD_S = 2.0
"For the scheduler's poll to hear why the instance ends."


@remote(max_restarts=0)
class RankActor:
    """A rank that follows: see `engine.group.follower`."""

    def __init__(self, spec: GenerationSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        begin_actor(_name(spec, rank))

    def follow(self, folder: str) -> None:
        """Compute this rank's share until the leader says stop. Raises GroupError: the leader is gone; as `_join`."""
        from ...engine.group.follower import Follower

        try:
            with closing(_join(folder, self._rank, self._spec)) as ranks:
                # whatever ends it: the others see closed sockets, and wait no longer
                Follower(ranks).follow()
        except Exception:
            logger.exception("rank %d of %s has ended", self._rank, self._spec.instance)
            raise


class RankActors:
    """The leader's side: the actors, and its own end of the group. Used by one thread."""

    def __init__(self, spec: GenerationSpec, tell: Callable[[InstanceLost], None]) -> None:
        """Start the actors and wait until all have met; `tell` hears why the group is lost, before this process ends.

        Raises WaitTimeout, naming who did not come; InstanceLost: a rank has ended; PlacementError: no
        folder to meet in.
        """
        self._actors: list[Handle] = [_started(spec, rank) for rank in range(1, spec.num_ranks)]
        self._following, self._tell = list[Any](), tell
        try:
            with tempfile.TemporaryDirectory(prefix=f"{spec.instance}-ranks-") as folder:
                self._following += [actor.follow.remote(folder) for actor in self._actors]
                self.ranks: GroupRanks = _join(folder, 0, spec, watch=self._require_following)
        except BaseException as error:
            self._end()
            if isinstance(error, TimeoutError):
                raise WaitTimeout(
                    waiter=spec.instance,
                    waited_for=f"{len(self._actors)} more rank(s) of it",
                    order="meet",
                    waited_s=START_TIMEOUT_S,
                    advice="look at their logs, and whether its node has room for cluster.generation.num_cpus times "
                    f"{spec.num_ranks}: {str(error).splitlines()[0]}",
                ) from error
            if isinstance(error, OSError):
                raise PlacementError(
                    f"the ranks of {spec.instance} cannot meet in {tempfile.gettempdir()}: {error}; make room there, "
                    "or let TMPDIR name another folder"
                ) from error
            raise
        self.ranks.on_lost = self._end_process
        # an idle leader sends nothing, so no socket would tell it
        Thread(target=self._watch, name="ranks", daemon=True).start()

    def close(self) -> None:
        """Let the other ranks end; those of a group that is broken are ended."""
        self.ranks.on_lost = None
        with suppress(InstanceLost):
            self.ranks.order("stop")
            ray.wait(self._following, num_returns=len(self._following), timeout=5.0)
        self.ranks.close()
        self._end()

    def _watch(self) -> None:
        """Wait until a rank has ended: the leader ends too, unless it has let them end."""
        ray.wait(self._following, num_returns=1)
        if self.ranks.on_lost is not None:
            self._end_process(InstanceLost("a rank has ended"))

    def _require_following(self) -> None:
        """Raise InstanceLost where a rank has ended."""
        if why := self._why_ended(0.0):
            raise InstanceLost(f"{why}; the instance cannot start")

    def _why_ended(self, timeout_s: float) -> str:
        """What the first rank said that has ended; empty: none has."""
        for ended in ray.wait(self._following, num_returns=1, timeout=timeout_s)[0]:
            rank, count = 1 + self._following.index(ended), 1 + len(self._following)
            try:
                ray.get(ended, timeout=timeout_s)
            except DEATHS as error:
                return f"rank {rank} of {count} has ended: {cause_of(error)}"
            except Exception as error:
                return f"rank {rank} of {count} has ended: {str(error).strip().splitlines()[-1]}"
        return ""

    def _end_process(self, lost: InstanceLost) -> None:
        """A leader without its ranks has nothing to go on with: who polls hears why, all others must see it dead."""
        why = self._why_ended(_LAST_WORDS_S)
        lost = InstanceLost(why) if why else lost
        logger.error("%s", lost)
        self._tell(lost)
        time.sleep(_HEARD_S)
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(1)

    def _end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


def _started(spec: GenerationSpec, rank: int) -> Handle:
    """A rank's actor in the leader's bundle; its environment is the leader's."""
    options: dict[str, Any] = {
        "name": _name(spec, rank),
        "namespace": spec.namespace,
        "num_cpus": spec.rank_cpus,
        "num_gpus": spec.gpu_share if assigned_gpus() else 0.0,
    }
    group = ray.util.get_current_placement_group()
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=spec.bundle
        )
    actor: Any = RankActor
    return actor.options(**options).remote(spec, rank)


def _name(spec: GenerationSpec, rank: int) -> str:
    return f"{spec.instance}-rank-{rank}"


def _join(
    folder: str, rank: int, spec: GenerationSpec, watch: Callable[[], None] = lambda: None
) -> GroupRanks:
    """Meet the others.

    Raises TimeoutError, ConfigError as `resolve_device`, PlacementError: a GPU has no room; and what `watch` raises.
    """
    # the driver and the scheduler import this module, and have no use for torch
    from ...engine.group.ranks import joined

    pool, assigned = "cluster.generation", assigned_gpus()
    device = resolve_device(spec.engine.device, assigned=assigned, key="engine.device", pool=pool)
    if rank:
        # none holds more than the leader, which has asked
        who, needed, share = _name(spec, rank), spec.gpu_bytes, spec.gpu_share
        take_gpu_share(who, device, needed_bytes=needed, share=share, advice=INSTANCE_ADVICE)
    return joined(
        folder,
        rank,
        spec.num_ranks,
        instance=spec.instance,
        start_timeout_s=START_TIMEOUT_S,
        step_timeout_s=STEP_TIMEOUT_S,
        device=device,
        watch=watch,
    )
