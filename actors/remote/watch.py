"""Says in plain words who waits for whom when an answer takes unusually long, and that it came.

The process that runs the loop sets a watch; every wait in `waiting` and the reward pool looks at it. Nothing
here decides anything. Limits of time leave out what this process itself slept through.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakSet

from ...core.awake import AwakeClock, looking
from . import run_metrics

LOOK_S = 1.0
"A waiting process looks up this often at least."
LEAST_S = 15.0
"An answer that used to be quick is missed after this long,"
TIMES_USUAL = 3.0
"another one after so many times what it took last,"
FIRST_S = 60.0
"and one that was never given before after this long."
SLEPT_S = 10.0
"A look up that is late by more than this means that this process itself stood still."
_LOOKS = 5


Say = Callable[[str], None]


class Watch:
    """What a process has waited for so far, and whom to tell."""

    def __init__(
        self,
        note: Say | None = None,
        awaits: Say | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note` takes one line for a person; None says nothing. `clock` is monotonic, in seconds.

        `awaits` shows the present wait in the place of the last; None: `note` is told of each once.
        """
        self.note = note or (lambda text: None)
        self.awaits = awaits
        self.clock = clock
        self._usual_s: dict[str, float] = {}

    def usual_s(self, what: str) -> float | None:
        """Seconds that the same took last time, None when it never ended before."""
        return self._usual_s.get(_kind(what))

    def learn(self, what: str, seconds: float) -> None:
        """Remember how long it took."""
        self._usual_s[_kind(what)] = seconds


_current: ContextVar[Watch] = ContextVar("watch")


@contextmanager
def watching(note: Say, awaits: Say | None = None) -> Iterator[None]:
    """Let the waits of this block, in this thread, tell `note` what takes unusually long.

    `awaits`: as of `Watch`; that of the surrounding block where left out.
    """
    token = _current.set(Watch(note, awaits or (_current.get(None) or Watch()).awaits))
    try:
        yield
    finally:
        _current.reset(token)


class SeenWait(NamedTuple):
    """A wait without an answer so far."""

    waiter: str
    waited_for: str
    order: str
    since: float
    "seconds since the epoch"
    timeout_s: float


@contextmanager
def waits_noted(what: Callable[[], str]) -> Iterator[None]:
    """Tell the watch of the surrounding block what is waited for, every `LOOK_S` seconds until this one ends."""
    began_s, watch, last = time.monotonic(), _current.get(None) or Watch(), ""

    def say() -> None:
        nonlocal last
        awaited = f"waiting for {what()}"
        if watch.awaits is not None:
            watch.awaits(f"{awaited}; {time.monotonic() - began_s:.0f} s so far")
        elif awaited != last:
            watch.note(awaited)
        last = awaited

    with looking(say, LOOK_S, name="waits"):
        yield


_open_waits: WeakSet[OpenWait] = WeakSet()


def open_waits() -> list[SeenWait]:
    """What this process waits for now, the longest wait first; from any thread."""
    for _ in range(_LOOKS):
        # another thread may begin a wait meanwhile
        with suppress(RuntimeError):
            seen = [wait.seen() for wait in _open_waits]
            return sorted((one for one in seen if one is not None), key=lambda wait: wait.since)
    return []


class OpenWait:
    """One wait, from now on; to be looked at about every `LOOK_S`."""

    def __init__(
        self, *, waiter: str, waited_for: str, order: str, timeout_s: float, watch: Watch | None = None
    ) -> None:
        """`watch`: the one of the surrounding block where left out."""
        self._names = (waiter, waited_for, order)
        self._timeout_s = timeout_s
        self._watch = watch or _current.get(None) or Watch()
        self._clock = AwakeClock(longest_s=LOOK_S + SLEPT_S)
        self.restart()
        _open_waits.add(self)

    @property
    def waited_s(self) -> float:
        """Seconds since it began, this process's own pauses left out."""
        return self._clock.read(self._watch.clock()) - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds until it is to be given up, at least 0."""
        return max(0.0, self._timeout_s + self._heard_at_s - self.waited_s)

    def heard(self) -> None:
        """The other side gets on: the time until it is given up, or missed, begins anew."""
        self._heard_at_s = self.waited_s
        self._says_at_s = max(self._says_at_s, self._heard_at_s + LEAST_S)

    def restart(self) -> None:
        """Begin anew: the other side was heard of."""
        self._began_s = self._clock.read(self._watch.clock())
        self._heard_at_s = 0.0
        usual_s = self._watch.usual_s(self._what)
        self._says_at_s = FIRST_S if usual_s is None else max(LEAST_S, TIMES_USUAL * usual_s)
        self._has_said = False
        self._since = time.time()
        self._is_open = True

    def look(self) -> None:
        """No answer so far: say so when that is odd, then at doubling intervals."""
        waited_s = self.waited_s
        if waited_s < self._says_at_s:
            return
        self._says_at_s = 2 * waited_s
        self._has_said = True
        run_metrics.add("late_answers", waited_for=self._names[1])
        waiter, waited_for, order = self._names
        usual_s = self._watch.usual_s(self._what)
        usual = "never asked before" if usual_s is None else f"{_seconds(usual_s)} last time"
        self._watch.note(
            f"{waited_for} has not answered '{order}' for {waited_s:.0f} s ({usual}); "
            f"{waiter} gives up after {self._heard_at_s + self._timeout_s:.0f} s"
        )

    def overslept(self, seconds: float) -> None:
        """A look up came late by `seconds`: say that it was this process that stood still."""
        if seconds > SLEPT_S:
            self._watch.note(
                f"this process itself stood still for {seconds:.0f} s (stopped, or the machine was suspended); "
                "its time limits leave that out"
            )

    def answered(self) -> None:
        """The answer is there: remember how long it took, and say so if it was missed."""
        waited_s = self.waited_s
        self._is_open = False
        run_metrics.add("waited_seconds", waited_s, waited_for=self._names[1])
        self._watch.learn(self._what, waited_s)
        if self._has_said:
            _, waited_for, order = self._names
            self._watch.note(f"{waited_for} answered '{order}' after {waited_s:.0f} s")

    def rest(self) -> None:
        """Nothing is waited for until `restart`."""
        self._is_open = False

    def seen(self) -> SeenWait | None:
        """As people read it, from any thread; None where the answer is there."""
        waiter, waited_for, order = self._names
        if not self._is_open:
            return None
        return SeenWait(waiter, waited_for, order, since=self._since, timeout_s=self._timeout_s)

    @property
    def _what(self) -> str:
        _, waited_for, order = self._names
        return f"{waited_for}: {order}"


def _kind(what: str) -> str:
    """Versions and counts change from order to order."""
    return re.sub(r"\d+", "#", what)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1.0 else "under 1 s"
