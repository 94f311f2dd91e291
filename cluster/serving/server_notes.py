"""Lines for people from a server's replica, kept in Ray's store until the command that started it has shown them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.experimental import internal_kv

from ...core.awake import looking

logger = logging.getLogger(__name__)
_STORE = b"rlhfspec-server-notes"
_LOOK_S = 0.5


class ServerNotes:
    """Of one server, by the namespace of its session; written by one thread."""

    def __init__(self, server: str) -> None:
        """Begin with none."""
        self._key, self._lines = server.encode(), list[str]()

    def tell(self, line: str) -> None:
        """Say a line, in the log too."""
        logger.warning("%s", line)
        self._lines.append(line)
        internal_kv._internal_kv_put(self._key, json.dumps(self._lines).encode(), namespace=_STORE)

    @contextmanager
    def shown(self, note: Callable[[str], None]) -> Iterator[None]:
        """Give `note` what is said until the block ends, soon after it is said."""
        num_shown = 0

        def show() -> None:
            nonlocal num_shown
            kept = internal_kv._internal_kv_get(self._key, namespace=_STORE)
            lines = [] if kept is None else json.loads(kept)
            # a replica in the place of a lost one begins anew
            for line in lines[num_shown if len(lines) >= num_shown else 0 :]:
                note(line)
            num_shown = len(lines)

        with looking(show, _LOOK_S, name="server-notes"):
            yield
