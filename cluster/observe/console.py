"""Shows a run while it goes: progress bars on a terminal, plain lines elsewhere, a table at the end.

The loop calls `start`, `progress`, `iteration` and `note`; the command line calls `finish`. Nothing
here decides anything: a run with a silent reporter is the same run.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.status import Status
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ...core.outside import visible
from ..folder.layout import RunDir

_PLAIN_LINE_EVERY_S = 10.0
"Without a terminal, a long job says something this often, and at every new stage."
START_UP_STAGES = {
    "imports": "loading torch and transformers",
    "check": "checking models, data and memory",
    "profile": "reading the profile",
    "ray": "starting Ray",
    "actors": "starting actors, with their first weights",
}
"What a reporter calls the parts of a start, which are kept as `time/start_up_<part>_s`."


class PipeConsole(Console):
    """A console that shows text as it stands and draws only what is its own: no markup, no escape sequences of others.

    It raises when its reader is gone; rich's own would end the program without a word.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, markup=False, emoji=False)

    @property
    def file(self) -> IO[str]:
        """Where it writes: below every stream that stands in for another, while bars are shown too."""
        file = super().file
        while (below := getattr(file, "rich_proxied_file", None)) is not None:
            file = below
        return file

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, *args: Any, **settings: Any) -> Text:
        """Escape before the width is measured."""
        return super().render_str(visible(text), *args, **settings)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        # the last gate, for texts that are made elsewhere
        return super()._render_buffer(
            segment if segment.control else Segment(visible(segment.text), _without_link(segment.style))
            for segment in buffer
        )

    def on_broken_pipe(self) -> None:
        """Print nothing more, and let the command line say why the program stops."""
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _without_link(style: Style | None) -> Style | None:
    return style.update_link(None) if style is not None and style.link else style


class Listener(Protocol):
    """Hears what a reporter is told; iterations count from 0."""

    def progress(self, iteration: int, phase: str, done: int, total: int) -> None:
        """How far a phase of the iteration is."""
        ...

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """An iteration ended."""
        ...

    def note(self, text: str) -> None:
        """A line for people."""
        ...


class Reporter:
    """Progress of one run on a console; plain lines when the console is not a terminal."""

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or PipeConsole(highlight=False, soft_wrap=True)
        self.clock = clock
        self._began_s = clock()
        self.start_up_s: float | None = None
        "from the command to the first `start`; None before it"
        self._bars: Progress | None = None
        self._iterations: TaskID | None = None
        self._phase: TaskID | None = None
        self._total = 0
        self.stages_s: dict[str, float] = {}
        "seconds of each stage of the start-up so far"
        self._stage, self._stage_began_s = "", 0.0
        self._status: Status | None = None
        self._done = 0
        self.on_progress: Callable[[int, str], None] | None = None
        "called with the iteration in progress, counted from 0, and its phase"
        self.listener: Listener | None = None
        "is told the same as the console"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stage(self, text: str) -> None:
        """Say what the start-up is doing; on a terminal it turns until the next stage or `start`."""
        self._end_stage()
        self._stage, self._stage_began_s = text, self.clock()
        if self.console.is_terminal:
            self._status = self.console.status(Text(visible(text)))
            self._status.start()
        else:
            self.note(text)

    @property
    def awaits(self) -> Callable[[str], None] | None:
        """Shows what a stage waits for beside it, in the place of the last; None without a terminal."""
        return self._show_wait if self.console.is_terminal else None

    def _show_wait(self, text: str) -> None:
        if self._status is not None:
            self._status.update(Text(visible(f"{self._stage}: {text}")))

    def start(self, total_iterations: int, *, done: int = 0) -> None:
        """Begin: `total_iterations` is what the bar counts to, `done` of them are finished."""
        self._end_stage()
        if self.start_up_s is None:
            self.start_up_s = self.clock() - self._began_s
        self._total = total_iterations
        self._done = done
        self._send("")
        if not self.console.is_terminal:
            return
        self._bars = Progress(
            TextColumn("{task.description:<10}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self._iterations = self._bars.add_task(
            "iteration", total=total_iterations, completed=done, metrics=""
        )
        self._phase = self._bars.add_task("starting", total=None, metrics="")
        self._bars.start()

    def progress(self, phase: str, done: int, total: int) -> None:
        """Say how far the current phase of the iteration is (generate 12 of 64 samples)."""
        self._send(phase)
        if self.listener is not None:
            self.listener.progress(self._done, phase, done, total)
        if self._bars is not None and self._phase is not None:
            self._bars.update(self._phase, description=phase, completed=done, total=total)

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished iteration (counted from 0)."""
        self._send("save")
        self._done = iteration + 1
        if self.listener is not None:
            self.listener.iteration(iteration, metrics)
        line = describe_metrics(metrics)
        if self._bars is not None and self._iterations is not None:
            self._bars.update(self._iterations, completed=iteration + 1, metrics=line)
            return
        left_s = metrics.get("time/iteration_s", 0.0) * (self._total - iteration - 1)
        self.console.print(f"iteration {iteration + 1}/{self._total}  {line}  about {left_s:.0f} s left")

    def note(self, text: str) -> None:
        """Print one line above the bars."""
        if self.listener is not None:
            self.listener.note(text)
        self.console.print(text, markup=False)

    def stop(self) -> None:
        """Take the bars down; called however the run ended."""
        self._end_stage()
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def finish(self, rows: Sequence[tuple[str, str]], run_dir: RunDir) -> None:
        """Take the bars down and print the closing table."""
        self.stop()
        if not run_dir.path.is_dir():
            self.note(
                f"the run folder {run_dir.path} is gone, and with it what the run had written; run.copy_to keeps "
                "a copy elsewhere"
            )
            return
        if rows:
            table = Table(show_header=False, title="summary", title_justify="left")
            for row in rows:
                table.add_row(*row)
            self.console.print(table)
        else:
            self.console.print("no iteration finished")
        self.console.print(f"run folder {run_dir.path}", markup=False)

    def _send(self, phase: str) -> None:
        if self.on_progress is not None:
            self.on_progress(self._done, phase)

    def _end_stage(self) -> None:
        if self._stage:
            seconds = self.clock() - self._stage_began_s
            self.stages_s[self._stage] = self.stages_s.get(self._stage, 0.0) + seconds
            self._stage = ""
        if self._status is not None:
            self._status.stop()
            self._status = None

    @contextmanager
    def job(self, title: str) -> Iterator[Callable[[str, float], None]]:
        """Bar of a job before the run: yields `tick(stage, fraction)`, fraction from 0 to 1."""
        self._end_stage()
        if not self.console.is_terminal:
            yield self._plain_ticker(title)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console) as bars:
            task = bars.add_task(title, total=1.0)
            yield lambda stage, fraction: bars.update(
                task, description=f"{title}: {stage}", completed=fraction
            )

    def _plain_ticker(self, title: str) -> Callable[[str, float], None]:
        """Turns frequent ticks into a handful of lines."""
        last: tuple[str, float] = ("", 0.0)

        def tick(stage: str, fraction: float) -> None:
            nonlocal last
            now_s = self.clock()
            if stage != last[0] or now_s - last[1] >= _PLAIN_LINE_EVERY_S:
                last = stage, now_s
                self.note(f"{title}: {stage} ({fraction:.0%})")

        return tick


def plain_table(titles: Sequence[str], rows: Iterable[Iterable[str]], *, left: Sequence[str]) -> Table:
    """Without lines; the columns called `left` stand to the left, those of numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for at, title in enumerate(titles):
        side = "left" if title in left else "right"
        table.add_column(title, justify=side, overflow="fold", no_wrap=not at, min_width=min(6, len(title)))
    for row in rows:
        table.add_row(*row)
    return table


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """The metrics a person watches, in one line; what a run does not have is left out."""
    shown = [
        ("reward/mean", "reward {:.3f}"),
        ("learner/distill_loss", "distill_loss {:.3f}"),
        ("rollout/mean_acceptance_length", "accepts {:.2f}"),
        ("rollout/goodput_tokens_per_s", "{:,.0f} tokens/s"),
        ("time/iteration_s", "{:.1f} s"),
    ]
    if metrics.get("moves/num_moved"):
        shown.insert(-1, ("moves/num_moved", "{:.0f} moves"))
    if "learner/distill_loss" in metrics and metrics.get("reward/min") == metrics.get("reward/max"):
        shown = shown[1:]  # the teacher alone teaches
    return "  ".join(form.format(metrics[name]) for name, form in shown if name in metrics)
