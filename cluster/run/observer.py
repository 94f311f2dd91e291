"""Watches the loop from a thread of its own process: writes the live page, sets the loop's gauges.

It hears what the reporter is told, asks the scheduler how the instances stand, and goes on when the loop waits or
hangs. Nothing here decides anything, and nothing that fails here ends a run.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import ray

from ...actors.actor_messages import InstanceView
from ...actors.remote import run_metrics
from ...actors.remote.process_log import begin_process_log
from ...actors.remote.process_metrics import export_process_metrics
from ...actors.remote.watch import open_waits
from ...core.errors import RlhfSpecError, StorageError
from ...core.files import write_whole
from ...core.metrics import bounded_label
from ..folder.layout import RunDir
from ..folder.leftovers import drop_old_logs
from ..observe.console import Reporter
from ..observe.live_page import (
    PAGE_EVERY_S,
    STARTING,
    EventRow,
    InstanceRow,
    LivePage,
    WaitRow,
    drop_old_pages,
    store_page,
)
from ..ray_start.ray_session import RaySession

if TYPE_CHECKING:
    from ..system.system import System

logger = logging.getLogger(__name__)
LOOP = "loop"
"What the process of the loop is called among the actors."
KEPT_EVENTS = 20
TIDY_EVERY_S = 600.0
_ANSWER_S = 1.0


class Observer:
    """Of one run; hears the reporter (`cluster.observe.console.Listener`)."""

    def __init__(
        self,
        run_dir: RunDir,
        session: RaySession,
        *,
        num_iterations: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` in seconds since the epoch."""
        self._run_dir, self._session, self._clock = run_dir, session, clock
        self._num_iterations = num_iterations
        self._address = _ray_address()
        self._lock = threading.Lock()
        self._iteration, self._phase, self._done, self._total = 0, STARTING, 0, 0
        self._phase_since = self._progress_at = clock()
        self._metrics: Mapping[str, float] = {}
        self._events: deque[EventRow] = deque(maxlen=KEPT_EVENTS)
        self._system: System | None = None
        self._asked: Any = None
        self._heard_at = clock()
        self._views: tuple[InstanceView, ...] = ()
        self._mark: object = None
        self._counted_at = clock()
        self._tidied_at = 0.0

    def watch(self, system: System) -> None:
        """Look at the scheduler and the published weights from now on; of a system that begins anew, at its own."""
        self._system, self._asked, self._heard_at = system, None, self._clock()

    def progress(self, iteration: int, phase: str, done: int, total: int) -> None:
        """Hear how far the loop is; `iteration` counts from 0."""
        with self._lock:
            if (iteration, phase) != (self._iteration, self._phase):
                self._count_phase()
                self._phase_since = self._clock()
            self._iteration, self._phase, self._done, self._total = iteration, phase, done, total

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Hear the metrics of a finished iteration."""
        self.progress(iteration, "save", 0, 1)
        self._metrics = dict(metrics)
        run_metrics.add("iterations")
        logger.info("iteration %d ended", iteration + 1, extra={"fields": {"figures": self._metrics}})

    def note(self, text: str) -> None:
        """Hear a line for people."""
        self._events.append(EventRow(at=self._clock(), text=text))
        logger.info("%s", text)

    def look(self) -> LivePage:
        """Ask the scheduler, set the gauges, write the page."""
        self._ask()
        with self._lock:
            self._count_phase()
            page = self._page()
        set_gauges(page, outlived=not self._session.is_local)
        export_process_metrics(LOOP)
        self._write(page)
        self._tidy()
        return page

    def close(self) -> None:
        """The last page, gauges that say so."""
        with self._lock:
            page = self._page(ended=True)
        set_gauges(page, outlived=not self._session.is_local)
        self._write(page)

    def _ask(self) -> None:
        if self._system is None:
            return
        if self._asked is None:
            self._asked = self._system.scheduler.handle.views.remote()
        try:
            if ray.wait([self._asked], timeout=_ANSWER_S)[0]:
                asked, self._asked = self._asked, None
                answer: Any = ray.get(asked, timeout=_ANSWER_S)
                self._views = answer
                self._heard_at = self._clock()
        except Exception:
            # dead, or being replaced: its silence is told
            self._asked = None

    def _tidy(self) -> None:
        """Let go of what actors and runs left behind that are gone."""
        now = self._clock()
        if now - self._tidied_at >= TIDY_EVERY_S:
            self._tidied_at = now
            drop_old_logs(self._run_dir.logs_folder, now=now)
            with suppress(Exception):
                drop_old_pages(now)

    def _count_phase(self) -> None:
        now = self._clock()
        run_metrics.add("phase_seconds", now - self._counted_at, phase=self._phase or "between")
        self._counted_at = now

    def _page(self, *, ended: bool = False) -> LivePage:
        now, silent_s = self._clock(), 0.0
        if self._system is not None and not ended:
            silent_s = max(0.0, now - self._heard_at)
        rows = tuple(_row(view) for view in self._views)
        loads = [view.load for view in self._views if view.load is not None]
        emitted = sum(load.stats.num_emitted_tokens for load in loads)
        mark = (self._iteration, self._phase, self._done, emitted)
        if mark != self._mark:
            self._mark, self._progress_at = mark, now
        return LivePage(
            run=self._run_dir.path.name,
            folder=str(self._run_dir.path),
            namespace=self._session.namespace,
            pid=os.getpid(),
            host=socket.gethostname(),
            told_at=now,
            ended=ended,
            ray_address=self._address,
            num_iterations=self._num_iterations,
            iteration=self._iteration,
            phase=self._phase,
            phase_since=self._phase_since,
            done=self._done,
            total=self._total,
            progress_at=self._progress_at,
            weight_version=0 if self._system is None else self._system.target.manifest.weight_version,
            scheduler_silent_s=silent_s,
            figures=self._metrics,
            instances=rows,
            waits=() if ended else tuple(WaitRow(**wait._asdict()) for wait in open_waits()),
            events=tuple(self._events),
        )

    def _write(self, page: LivePage) -> None:
        text = page.encode()
        try:
            # the next one comes soon
            if not self._run_dir.owner.is_taken:
                write_whole(self._run_dir.live_file, text, durable=False)
        except StorageError:
            # a disk that is full is told by what needs it
            run_metrics.add("dropped_writes", file="live")
        with suppress(Exception):
            store_page(page.run, None if page.ended else text)


@contextmanager
def observing(
    run_dir: RunDir, session: RaySession, report: Reporter, *, num_iterations: int
) -> Iterator[Observer]:
    """Observe the block's loop, whose reporter is `report`; log of this process and gauges included."""
    run = run_dir.path.name
    end_log = begin_process_log(run_dir.logs_folder, LOOP, run=run)
    run_metrics.begin(run_metrics.RaySink(run))
    observer = Observer(run_dir, session, num_iterations=num_iterations)
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(PAGE_EVERY_S):
            try:
                observer.look()
            except Exception:
                logger.exception("the observer could not look")

    thread = threading.Thread(target=look, name="observer", daemon=True)
    thread.start()
    report.listener = observer
    try:
        yield observer
    finally:
        report.listener = None
        ended.set()
        thread.join(timeout=2 * _ANSWER_S)
        with suppress(Exception):
            observer.close()
        run_metrics.begin(None)
        end_log()


def _row(view: InstanceView) -> InstanceRow:
    load = view.load
    if load is None:
        return InstanceRow(
            name=view.instance,
            state=view.state,
            num_slots=view.num_slots,
            activity=view.activity,
            activity_s=view.activity_s,
        )
    return InstanceRow(
        name=view.instance,
        state=view.state,
        num_owned=view.num_owned,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_slots=view.num_slots,
        tokens_per_s=load.goodput_tokens_per_s if load.num_running else 0.0,
        acceptance_length=load.stats.mean_acceptance_length,
        weight_version=load.weight_version,
        silent_s=view.silent_s,
        activity=view.activity,
        activity_s=view.activity_s,
        drafter_alarm=load.drafter_alarm,
        num_ranks=load.num_ranks,
    )


def set_gauges(page: LivePage, *, outlived: bool) -> None:
    """Set what the page says, again and again: Ray forgets a gauge that was not set for 20 s.

    `outlived`: Ray goes on after the run, so that the port can tell its end.
    """
    wait_s = max((page.told_at - wait.since for wait in page.waits), default=0.0)
    for name, value in (
        ("run_up", float(not page.ended)),
        ("run_outlived", float(outlived)),
        ("heartbeat_timestamp_seconds", page.told_at),
        ("end_timestamp_seconds", page.told_at if page.ended else 0.0),
        ("progress_timestamp_seconds", page.progress_at),
        ("iteration", min(page.iteration + 1, page.num_iterations)),
        ("iterations_planned", page.num_iterations),
        ("samples_done", page.done),
        ("samples_planned", page.total),
        ("policy_weight_version", page.weight_version),
        ("wait_seconds", wait_s),
        ("scheduler_silent_seconds", page.scheduler_silent_s),
    ):
        run_metrics.set_value(name, value)
    serving: Counter[str] = Counter()
    for row in page.instances:
        # labels begin anew after some: one that is gone must not speak for a living one of the same label
        serving[bounded_label("actor", row.name)] += row.state == "serving" and not page.ended
    for actor, count in serving.items():
        run_metrics.set_value("instance_serving", float(count), actor=actor)
    if not page.ended:
        with suppress(RlhfSpecError):
            # whoever writes metrics.jsonl has refused what is not declared
            run_metrics.set_metrics(page.figures)


def _ray_address() -> str:
    with suppress(Exception):
        return str(ray.get_runtime_context().gcs_address)
    return ""
