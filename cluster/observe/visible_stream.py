"""Standard output and error on which text of models and files is seen and never obeyed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from ...core.outside import visible


class VisibleStream:
    """A text stream that writes out escape sequences; rich, which makes its own, writes to the one below."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write `visible(text)`; returns how much of `text` that was."""
        self.rich_proxied_file.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def show_escape_sequences() -> None:
    """Put such streams in the place of both, for as long as the process lives; once is enough.

    What Python itself prints of an error that nobody expected goes there too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, VisibleStream(stream))
