"""A run's state as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..folder.run_status import span
from .console import describe_metrics
from .live_page import STALE_AFTER_S, STARTING, LivePage

SHOWN_EVENTS = 8


def status_view(
    page: LivePage | None, *, state: Sequence[str], now: float, actors: Iterable[str] = ()
) -> RenderableType:
    """Everything that `rlhfspec status` prints.

    Args:
        page: what the run told last; None: it never told anything.
        state: lines of `describe_status`, or who answered.
        now: seconds since the epoch.
        actors: names of living actors, where a cluster was asked.
    """
    parts: list[RenderableType] = [Text(line) for line in state]
    if page is None:
        parts.append(
            Text("no live.json: the run is starting and has told nothing yet, or it ended before it could")
        )
        return Group(*parts)
    parts += [Text(line) for line in page_lines(page, now)]
    if page.instances:
        parts.append(_instances(page))
    names = sorted(actors)
    if names:
        parts.append(Text(f"actors    {', '.join(names)}"))
    if page.events:
        parts.append(Text("last events"))
        parts += [
            Text(f"  {datetime.fromtimestamp(event.at):%H:%M:%S}  {event.text}")
            for event in page.events[-SHOWN_EVENTS:]
        ]
    return Group(*parts)


def stale_lines(page: LivePage, now: float) -> list[str]:
    """Whether the page is of now; what to do when it is not."""
    age_s = max(0.0, now - page.told_at)
    if page.ended or age_s <= STALE_AFTER_S:
        return []
    return [
        f"stale: the run told nothing for {span(age_s)} (process {page.pid} on {page.host}); what follows is what it "
        "told last"
    ]


def page_lines(page: LivePage, now: float) -> list[str]:
    """What it does, for whom it waits and since when, a line each."""
    shown = stale_lines(page, now)
    # of an old page, ages are those of when it was told
    now = now if now - page.told_at <= STALE_AFTER_S and not page.ended else page.told_at
    lines = [f"run       {page.run}  {page.folder} on {page.host}", *shown]
    lines.append(f"iteration {_where(page, now)}")
    if page.figures:
        lines.append(f"last      {describe_metrics(page.figures)}")
    rate = sum(row.tokens_per_s for row in page.instances)
    lines.append(f"weights   version {page.weight_version}; {rate:,.0f} tokens/s now")
    lines += [
        f"waits     {wait.waiter} for {wait.waited_for} to '{wait.order}' since {span(now - wait.since)}, "
        f"gives up after {wait.timeout_s:.0f} s"
        for wait in page.waits[:3]
    ]
    if page.scheduler_silent_s > STALE_AFTER_S / 2:
        lines.append(f"scheduler has not answered for {span(page.scheduler_silent_s)}")
    return lines


def _where(page: LivePage, now: float) -> str:
    """How far the run is, or where it ended."""
    for_s = span(now - page.phase_since)
    if page.iteration >= page.num_iterations:
        return f"all {page.num_iterations} ended"
    if page.ended and page.phase == STARTING:
        return f"none begun: it ended while it was starting, after {for_s}"
    done = f" {page.done} of {page.total}" if page.total > 1 else ""
    at, phase = f"{page.iteration + 1} of {page.num_iterations}", f"{page.phase or 'between phases'}{done}"
    if page.ended:
        return f"{at}: ended in {phase}, after {for_s}"
    return f"{at}: {phase} for {for_s}, last progress {span(now - page.progress_at)} ago"


def _instances(page: LivePage) -> Table:
    table = Table(title="instances", title_justify="left", box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("state", no_wrap=True)
    has_ranks = any(row.num_ranks > 1 for row in page.instances)
    if has_ranks:
        table.add_column("ranks", justify="right")
    for title in ("running", "waiting", "slots", "tokens/s", "accepts", "version", "heard"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in page.instances:
        is_gone = row.state == "gone"
        table.add_row(
            row.name,
            f"{row.activity} {span(row.activity_s)}"
            if row.state == "serving" and row.activity
            else row.state,
            *([str(row.num_ranks)] if has_ranks else []),
            *("-" if is_gone else str(n) for n in (row.num_running, row.num_waiting, row.num_slots)),
            "-" if is_gone else f"{row.tokens_per_s:,.0f}",
            f"{row.acceptance_length:.2f}",
            "-" if is_gone else str(row.weight_version),
            "-" if is_gone else f"{row.silent_s:.0f} s ago",
            "drafter alarm" if row.drafter_alarm else "",
        )
    return table
