"""Work for an instance's idle time: a thread that computes only while the decode loop has no samples.

The decode loop allows and stops it and never waits for it, but where it is about to change what the work reads
(weights): there it waits for the operation under way. Nothing here knows Ray, or what the work is.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ...core.errors import WaitTimeout

logger = logging.getLogger(__name__)
NICENESS = 19
"Of the thread, where the system knows threads' priorities: a core that somebody else needs is theirs."
PAUSE_TIMEOUT_S = 60.0
"For the operation under way, which takes milliseconds."

Work = Callable[[Callable[[], bool]], bool]
"One unit, on the thread; it asks the function that it is given, between two operations, whether to stop. True: go on."


class IdleWork:
    """Runs units of work while it is allowed and there is something to do."""

    def __init__(self, work: Work, *, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which does nothing yet.

        Args:
            work: a unit; False: nothing more to do until `more` says so. What it raises ends all of it (`failure`).
            name: of the thread.
            begin: called on it first.
        """
        self._work, self._begin = work, begin
        self._changed = threading.Condition()
        self._allowed = False
        self._closing = False
        self._is_computing = False
        self._num_asked = 0
        self._num_done = 0
        "told of before the last unit that found nothing more to do"
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """Whether it is allowed and has something to do: it computes, or is about to."""
        return self._allowed and self._num_asked > self._num_done and self.failure is None

    def more(self) -> None:
        """There is something to do; from any thread, at once."""
        with self._changed:
            self._num_asked += 1
            self._changed.notify_all()

    def allow(self) -> None:
        """Nobody needs the core now."""
        if self._allowed:
            return
        with self._changed:
            self._allowed = True
            self._changed.notify_all()

    def stop_soon(self) -> None:
        """Somebody needs it; returns at once, the operation under way is the last."""
        self._allowed = False

    def pause(self) -> None:
        """Stop, and return when nothing is being computed. Raises WaitTimeout."""
        self.stop_soon()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_computing, timeout=PAUSE_TIMEOUT_S):
                raise WaitTimeout(
                    waiter="the decode loop",
                    waited_for=self._thread.name,
                    order="stop after the operation under way",
                    waited_s=PAUSE_TIMEOUT_S,
                    advice="set drafter_training.spot: off",
                )

    def close(self) -> None:
        """End the thread after the operation under way."""
        with self._changed:
            self._allowed, self._closing = False, True
            self._changed.notify_all()
        self._thread.join(PAUSE_TIMEOUT_S)

    def _should_stop(self) -> bool:
        return not self._allowed

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._begin()
        except Exception as error:
            logger.exception("%s is given up", self._thread.name)
            self.failure = error
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self.is_active)
                if self._closing:
                    return
                self._is_computing, num_asked = True, self._num_asked
            goes_on = False
            try:
                goes_on = self._work(self._should_stop)
            except Exception as error:
                logger.exception("%s is given up", self._thread.name)
                self.failure = error
            finally:
                with self._changed:
                    self._is_computing = False
                    self._num_done = self._num_done if goes_on else num_asked
                    self._changed.notify_all()
