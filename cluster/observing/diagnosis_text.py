"""A diagnosis as text for one screen, or with every stack whole."""

from __future__ import annotations

import re

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfspec.cluster.observing.diagnosis import Diagnosis
from rlhfspec.cluster.observing.processes import SeenProcess
from rlhfspec.cluster.observing.stacks import Frame, ThreadStack
from rlhfspec.cluster.observing.status_text import clock_time, page_lines, span

_OURS = re.compile(r"(?:^|/)((?:core|profiles|policies|engine|learning|actors|cluster)/[\w/]+\.py)$")
_LIBRARIES = ("site-packages", "dist-packages")
_HELPERS = ("actors/waiting/", "cluster/observing/", "cluster/folder/run_status.py")
"Whoever waits does so there: what counts is who called them. Threads that run nothing else only look on."
_SHOWN_THREADS = 2
_MOVES = 3
_EVENTS = 3
_MB = 1 << 20


def diagnosis_view(diagnosis: Diagnosis, *, now: float, with_stacks: bool = False) -> RenderableType:
    """Everything that `rlhfspec diagnose` prints; `now` in seconds since the epoch."""
    page, processes = diagnosis.page, diagnosis.processes
    parts: list[RenderableType] = []
    if page is not None:
        parts += [Text(line) for line in page_lines(page, now)]
        if not page.waits:
            parts.append(Text("waits     none that the loop told of"))
    if processes:
        parts.append(_table(processes))
    else:
        parts.append(
            Text(f"no process of {diagnosis.run} was found: it has ended, or runs on another machine")
        )
    for node in diagnosis.nodes:
        if node.memory_bytes:
            used = node.memory_bytes - node.memory_free_bytes
            store = (
                f"; object store {node.store_bytes // _MB:,} of {node.store_limit_bytes // _MB:,} MB"
                if node.store_limit_bytes
                else ""
            )
            parts.append(
                Text(f"memory    {node.host}: {used // _MB:,} of {node.memory_bytes // _MB:,} MB used{store}")
            )
    if diagnosis.silent:
        parts.append(Text("did not answer"))
        parts += [Text(f"  {line}") for line in diagnosis.silent]
    if page is not None:
        parts.append(Text("last decisions"))
        parts += [Text(f"  {row.name} drafts {row.draft}") for row in page.instances if row.draft]
        parts += [Text(f"  {clock_time(move.at)}  {move.text}") for move in page.moves[-_MOVES:]]
        parts += [Text(f"  {clock_time(event.at)}  {event.text}") for event in page.events[-_EVENTS:]]
    if with_stacks:
        parts += [Text(line) for one in processes for line in _stacks(one)]
    return Group(*parts)


def where(stack: ThreadStack) -> str | None:
    """Where a thread is in our code, and in what it calls there; None for one that does not run ours, or looks on."""
    ours = next(
        ((number, path) for number, frame in enumerate(stack.frames) if (path := _own_path(frame))), None
    )
    if ours is None:
        return None
    number, path = ours
    frame, innermost = stack.frames[number], stack.frames[0]
    calls = f" calls {innermost.function}" if number else ""
    return f"{path}:{frame.line} {frame.function}{calls}"


def _own_path(frame: Frame) -> str | None:
    match = _OURS.search(frame.file)
    if match is None or any(name in frame.file for name in _LIBRARIES):
        return None
    return None if match[1].startswith(_HELPERS) else match[1]


def _table(processes: list[SeenProcess]) -> Table:
    table = Table(title="processes", title_justify="left", box=None, pad_edge=False)
    for title in ("name", "host", "pid", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("own MB", "store MB", "cpu"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    for one in processes:
        places = [place for stack in one.stacks if (place := where(stack))]
        more = f" (and {len(places) - _SHOWN_THREADS} more threads)" if len(places) > _SHOWN_THREADS else ""
        table.add_row(
            one.actor,
            one.host,
            str(one.pid),
            "stopped" if one.is_stopped else "lives",
            f"{one.own_bytes // _MB:,}",
            f"{one.shared_bytes // _MB:,}",
            span(one.cpu_s),
            "; ".join(places[:_SHOWN_THREADS]) + more or ("idle" if one.stacks else ""),
        )
    return table


def _stacks(one: SeenProcess) -> list[str]:
    lines = [f"stacks of {one.actor} ({one.pid} on {one.host})"]
    for stack in one.stacks:
        lines.append(f"  thread {stack.name}")
        lines += [f"    {frame.file}:{frame.line} {frame.function}" for frame in stack.frames]
    return lines
