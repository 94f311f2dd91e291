"""Actors at work are asked, about every second, whether they live and get on: a frozen one is found soon.

Work may take long; an actor that answers is never taken for frozen, however long it works. One call that keeps Python's
lock (a regular expression, an extension that does not let go of it) lets no actor answer: it counts as silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import ray

from ...core.awake import AwakeClock
from .deaths import DEATHS
from .remote import Handle
from .waiting import ActorDied, wait_any
from .watch import LOOK_S, SLEPT_S

_LONGEST = 0.5
"Share of the limit that counts between two looks at most: no pause of one's own is a silence of others."


@dataclass(slots=True)
class _Watched:
    actor: Handle
    order: str
    is_up: bool
    question: Any = None
    asked_s: float = 0.0
    count: int = 0
    is_silent: bool = False


class Heartbeat:
    """Of the actors that are watched; to be looked at about every `LOOK_S`."""

    def __init__(
        self,
        ask: Callable[[Handle], Any],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No actor yet.

        Args:
            ask: calls what an actor answers at once, whatever it is at, with how far it is or None: the reference.
            timeout_s: one that answers nothing for so long is lost.
            clock: monotonic, in seconds.
        """
        self._ask, self._timeout_s, self._clock = ask, timeout_s, clock
        self._awake = AwakeClock(longest_s=min(LOOK_S + SLEPT_S, _LONGEST * timeout_s))
        self._watched: dict[str, _Watched] = {}

    def watch(self, name: str, actor: Handle, order: str, *, is_up: bool = True) -> None:
        """Ask an actor from now on, while the loop waits for `order`; one that is not up may take its time to start."""
        known = self._watched.get(name)
        if known is None:
            self._watched[name] = _Watched(actor, order, is_up)
        else:
            known.order, known.is_up = order, known.is_up or is_up

    def keep(self, names: Collection[str]) -> None:
        """Watch no others any more."""
        self._watched = {name: one for name, one in self._watched.items() if name in names}

    def is_silent(self, name: str) -> bool:
        """Whether an actor that is up had not answered at the last look, and is not given up yet."""
        return name in self._watched and self._watched[name].is_silent

    def look(self) -> bool:
        """Whether one of them has got on since the last look. Raises ActorDied naming one that is silent."""
        now_s = self._awake.read(self._clock())
        gets_on = False
        for name, one in list(self._watched.items()):
            if one.question is not None:
                if not wait_any([one.question], timeout_s=0.0):
                    one.is_silent = one.is_up
                    if one.is_up:
                        self._require_heard(name, one.order, now_s - one.asked_s)
                    continue
                try:
                    answer: int | None = ray.get(one.question)
                except DEATHS:
                    # what it was ordered fails with it, and is told better there
                    del self._watched[name]
                    continue
                count = answer or 0
                gets_on = gets_on or count > one.count
                one.count, one.is_up, one.is_silent = count, True, False
            one.question, one.asked_s = self._ask(one.actor), now_s
        return gets_on

    def _require_heard(self, name: str, order: str, silent_s: float) -> None:
        if silent_s > self._timeout_s:
            raise ActorDied(
                f"{name} gave no sign of life for {silent_s:.0f} s (cluster.heartbeat_timeout_s) while the loop waited "
                f"for '{order}': its process is frozen, or its machine out of reach, or "
                "one call of its code keeps Python's lock for as long",
                name,
            )
