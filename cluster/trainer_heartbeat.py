"""Trainers at work are asked, about every second, whether they live and get on: a frozen one is found soon.

An update may take long; a trainer that answers is never taken for frozen, however long it works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from actors.ray_utils.deaths import DEATHS
from actors.ray_utils.remote import Handle
from actors.ray_utils.waiting import wait_any
from actors.ray_utils.watch import LOOK_S, SLEPT_S
from core.awake import AwakeClock
from core.errors import InstanceLost


class TrainerHeartbeat:
    """Of one order to some trainers, from now on; to be looked at about every `LOOK_S`."""

    def __init__(
        self,
        trainers: Mapping[str, Handle],
        *,
        order: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: one that answers nothing for so long is lost. `clock` is monotonic, in seconds."""
        self._order, self._timeout_s, self._clock = order, timeout_s, clock
        self._awake = AwakeClock(longest_s=LOOK_S + SLEPT_S)
        self._trainers = dict(trainers)
        self._asked: dict[str, tuple[Any, float]] = {}
        self._counts: dict[str, int] = {}

    def look(self) -> bool:
        """Whether one of them has got on since the last look. Raises InstanceLost naming one that is silent."""
        now_s = self._awake.read(self._clock())
        before = dict(self._counts)
        for name in list(self._trainers):
            asked = self._asked.get(name)
            if asked is not None and not wait_any([asked[0]], timeout_s=0.0):
                self._require_heard(name, now_s - asked[1])
                continue
            try:
                if asked is not None:
                    self._counts[name] = ray.get(asked[0])
            except DEATHS:
                # what it was ordered fails with it, and is told better there
                del self._trainers[name]
                continue
            self._asked[name] = (self._trainers[name].forwards_so_far.remote(), now_s)
        return any(count > before.get(name, 0) for name, count in self._counts.items())

    def _require_heard(self, name: str, silent_s: float) -> None:
        if silent_s > self._timeout_s:
            raise InstanceLost(
                f"{name} gave no sign of life for {silent_s:.0f} s (cluster.heartbeat_timeout_s) while the loop waited "
                f"for '{self._order}': its process is frozen, or its machine out of reach"
            )
