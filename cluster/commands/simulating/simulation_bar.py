"""A progress bar for simulations that take longer than somebody waits for without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SHOW_AFTER_S = 2.0


@contextmanager
def simulation_bar(total: int, console: Any) -> Iterator[Callable[[str, int], None]]:
    """Yield `tick(name, done)`; a bar appears when it takes longer than two seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description:<22}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task("simulating", total=total)
    began_s = time.monotonic()
    finished: dict[str, int] = {}

    def tick(name: str, done: int) -> None:
        finished[name] = done
        if not progress.live.is_started and time.monotonic() - began_s > SHOW_AFTER_S:
            progress.start()
        progress.update(task, description=name, completed=sum(finished.values()))

    try:
        yield tick
    finally:
        progress.stop()
