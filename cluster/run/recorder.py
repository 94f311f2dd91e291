"""Keeps what instances and scheduler did: every move on disk, the last iteration's timeline as a trace.

And every decode step, where `run.step_log` is set: `rlhfspec replay` reads it.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...actors.remote import run_metrics
from ...actors.remote.remote import Handle
from ...actors.remote.waiting import get
from ...actors.trace_events import TraceEvent
from ...core.errors import RlhfSpecError, StorageError, describe_error
from ...core.files import storage_errors, write_whole
from ..folder.iteration_logs import append_moves, odd_moves
from ..folder.layout import KEPT_TRACES, RunDir
from ..observe.console import Reporter
from ..observe.iteration_metrics import move_metrics
from ..observe.timeline import make_trace

if TYPE_CHECKING:
    from ..system.starting_and_leaving import FinalReport
    from .stream import Collected

SPANS_TIMEOUT_S = 2.0
"An instance that has not answered by then is left out: a timeline is not worth a wait."
STEPS_TIMEOUT_S = 30.0
"A log with a gap cannot be replayed: worth a longer wait."


class Recorder:
    """Of one run. The spans of every iteration are fetched, so that no instance's log of them runs over."""

    def __init__(self, run_dir: RunDir, report: Reporter, *, step_log: bool = False) -> None:
        self._run_dir = run_dir
        self._report = report
        self._step_log = step_log
        self._last = ""
        "the trace of the last iteration"

    def record(
        self,
        iteration: int,
        collected: Collected,
        instances: Mapping[str, Handle],
        left: Mapping[str, FinalReport] | None = None,
    ) -> dict[str, float]:
        """Take what happened in one iteration's generation; return the metrics of its moves.

        `left`: what instances told that left meanwhile.
        """
        left = left or {}
        spans = self._take_spans(instances) | {name: words.spans for name, words in left.items()}
        trace = make_trace(spans, collected.moves)
        self._last = trace.text(iteration)
        self._keep_trace(iteration)
        if self._step_log:
            self._write_steps(iteration, instances)
            for name, words in left.items():
                self._write_step_log(iteration, name, words.steps)
        append_moves(self._run_dir.moves_file, iteration, collected.moves)
        for line in odd_moves(collected.moves):
            self._report.note(line)
        return move_metrics(
            collected.moves, stats=collected.stats, planning_s=collected.planning_s, trace=trace
        )

    def pass_over(self, instances: Mapping[str, Handle]) -> None:
        """Drop the spans of what was no training: the next timeline is not to show an evaluation.

        Decode steps stay: a log with a gap cannot be replayed.
        """
        self._take_spans(instances)

    def _write_steps(self, iteration: int, instances: Mapping[str, Handle]) -> None:
        """Write each instance's decode steps since the last call; one that does not answer is left out with a note.

        Raises StorageError.
        """
        refs = {name: handle.take_step_log.remote(STEPS_TIMEOUT_S) for name, handle in instances.items()}
        for name, ref in refs.items():
            try:
                log = get(
                    ref,
                    waiter="the loop",
                    waited_for=name,
                    order="hand over the step log",
                    timeout_s=2 * STEPS_TIMEOUT_S,
                )
            except RlhfSpecError as error:
                self._report.note(f"the step log of {name} ends before iteration {iteration + 1}: {error}")
                continue
            self._write_step_log(iteration, name, log)

    def _write_step_log(self, iteration: int, name: str, log: bytes) -> None:
        if log:
            path = self._run_dir.steps_file(name, iteration)
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, log)

    def _keep_trace(self, iteration: int) -> None:
        """Keep the iteration's trace, the oldest goes; what cannot be written is left out."""
        path = self._run_dir.trace_file(iteration)
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, gzip.compress(self._last.encode(), 1, mtime=0), durable=False)
            self._run_dir.trace_file(iteration - KEPT_TRACES).unlink(missing_ok=True)
        except (OSError, StorageError):
            run_metrics.add("dropped_writes", file="trace")

    def write_timeline(self) -> None:
        """Write `timeline.json` of the last iteration; without any, nothing.

        What goes wrong is a note: a timeline neither ends a run nor hides what ended it.
        """
        if not self._last or self._run_dir.owner.is_taken:
            return
        try:
            write_whole(self._run_dir.timeline_file, self._last)
        except Exception as error:
            self._report.note(f"the timeline is missing: {describe_error(error)}")

    def _take_spans(self, instances: Mapping[str, Handle]) -> dict[str, list[TraceEvent]]:
        """What each instance did since the last call; one that does not answer is left out with a note."""
        refs = {name: handle.take_spans.remote() for name, handle in instances.items()}
        deadline_s = time.monotonic() + SPANS_TIMEOUT_S
        spans: dict[str, list[TraceEvent]] = {}
        for name, ref in refs.items():
            try:
                spans[name] = get(
                    ref,
                    waiter="the loop",
                    waited_for=name,
                    order="say what it did when",
                    timeout_s=max(0.0, deadline_s - time.monotonic()),
                )
            except RlhfSpecError as error:
                self._report.note(f"{name} is left out of the timeline: {error}")
        return spans
