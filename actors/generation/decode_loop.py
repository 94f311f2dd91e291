"""The decode loop of one instance: engine state has one writer, and orders one logged order.

Control threads put orders into a mailbox; the loop empties it between decode steps, at numbered step
boundaries, so that the log of (boundary, order), at level DEBUG, says what an instance did (design 3.5). Completions
wait in an outbox until a later poll acknowledges them: an answer that is lost is given again.
Nothing here knows Ray.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...core.decode_records import InstanceLoad, StepRecord
from ...core.errors import RlhfSpecError
from ...core.progress import Progress
from ...core.records import ATTEMPT_EPOCH, Completion, SampleKey
from ...core.weight_records import WeightManifest
from ...policies.migration.move_messages import MoveReport
from ..actor_messages import HeldSamples, PollReply
from ..trace_events import TraceLog
from .loop_orders import (
    CallOrder,
    CutOrder,
    HoldOrder,
    LoadOrder,
    LoopOrder,
    MoveEventOrder,
    RememberOrder,
    StepLogOrder,
    StopOrder,
    SubmitOrder,
)

if TYPE_CHECKING:
    # they import torch, which the scheduler has no use for
    from ..migration.migrator import Migrator
    from .engine_host import ManifestHost

logger = logging.getLogger(__name__)
TICK_S = 0.1
"How often an idle loop looks after its open moves."
GATHER_S = 0.05
"Between two answers to polls, while samples run: an answer tells of all of them, and many samples end at once."


_NEEDS_THE_CORE = (SubmitOrder, MoveEventOrder, LoadOrder, StopOrder)
"Orders after which the loop computes, or ends: what computes in idle time stops."


@dataclass(frozen=True, slots=True)
class _Published:
    """What polls read: written at step boundaries under the lock."""

    load: InstanceLoad | None = None
    progress: Progress = field(default_factory=Progress)


class DecodeLoop:
    """Runs an engine; `run` on one thread, `order` and `poll` on any other."""

    def __init__(
        self,
        instance: str,
        host: ManifestHost,
        *,
        report_interval_s: float,
        on_report: Callable[[InstanceLoad], None] = lambda load: None,
        make_migrator: Callable[[DecodeLoop], Migrator] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance = instance
        self._host = host
        self._report_interval_s = report_interval_s
        self._on_report = on_report
        self._clock = clock
        self._mailbox: queue.SimpleQueue[tuple[LoopOrder, Future]] = queue.SimpleQueue()
        self._later: list[tuple[LoopOrder, Future]] = []
        "orders that wait for what is being settled"
        self._changed = threading.Condition()
        self.open_epochs: dict[SampleKey, int] = {}
        "samples taken and not finished; the migrator keeps it up to date for those that move"
        self._term = 0
        self._outbox: deque[tuple[int, Completion | MoveReport]] = deque()
        self._sequence = 0
        self._published = _Published()
        self._published_at_s = 0.0
        self._publish_s = 0.0
        "spent on telling polls what they read"
        self._move_s = 0.0
        "spent on moves, prefilling again included"
        self._answered_at_s = 0.0
        self._step_began_s: float | None = None
        self._failure: BaseException | None = None
        self._ended: BaseException | None = None
        self._stopping = False
        self.boundary = 0
        self.spans = TraceLog()
        self._is_stale = False
        "a decode step was made since the last publication"
        self._migrator = make_migrator(self) if make_migrator else None

    def order(self, order: LoopOrder) -> Future:
        """Put an order into the mailbox; the future answers once a boundary has carried it out."""
        future: Future = Future()
        with self._changed:
            if self._ended is None:
                self._mailbox.put((order, future))
                if isinstance(order, _NEEDS_THE_CORE):
                    # before the loop wakes: every moment counts
                    self._let_idle_work(end=True)
            else:
                future.set_exception(self._ended)
        return future

    def poll(self, *, acknowledged: int, wait_s: float) -> PollReply:
        """Drop completions up to `acknowledged`; return the others, waiting up to `wait_s` for one.

        An idle instance answers when it gets work, too: what polls it waits long, and has to look more often now.
        A busy one answers every GATHER_S at most. Raises what ended the loop, if it failed.
        """
        with self._changed:
            while self._outbox and self._outbox[0][0] <= acknowledged:
                self._outbox.popleft()
            was_idle = not self.open_epochs
            self._changed.wait_for(
                lambda: self._outbox or self._failure or self._stopping or (was_idle and self.open_epochs),
                timeout=wait_s,
            )
            if not was_idle:
                self._changed.wait_for(
                    lambda: self._failure or self._stopping or not self.open_epochs,
                    timeout=max(self._answered_at_s + GATHER_S - self._clock(), 0.0),
                )
            if self._failure is not None:
                raise self._failure
            self._answered_at_s = self._clock()
            began_s = self._step_began_s
            return PollReply(
                instance=self._instance,
                boundary=self.boundary,
                busy_s=0.0 if began_s is None else self._clock() - began_s,
                load=self._published.load,
                completions=tuple(item for _, item in self._outbox if isinstance(item, Completion)),
                moves=tuple(item for _, item in self._outbox if isinstance(item, MoveReport)),
                is_training=self._host.spot_trainer is not None and self._host.spot_trainer.is_active,
                sequence=self._sequence,
                progress=self._published.progress,
            )

    def lose(self, why: BaseException) -> None:
        """Let polls raise why this instance ends; from any thread."""
        with self._changed:
            self._failure = why
            self._changed.notify_all()

    def report(self, report: MoveReport) -> None:
        """Tell the scheduler of a move, in order with completions; given again until acknowledged."""
        with self._changed:
            self._sequence += 1
            self._outbox.append((self._sequence, report))
            self._changed.notify_all()

    def run(self) -> None:
        """Alternate between orders and decode steps until a stop order. Raises what a step raises."""
        try:
            while not self._stopping:
                self.run_once(wait_s=None)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._end(self._failure or RlhfSpecError(f"instance {self._instance} has been stopped"))

    def run_once(self, wait_s: float | None) -> None:
        """One step boundary, and the decode step behind it if there is work.

        Without work, wait up to `wait_s` for an order; None waits for as long as it takes.
        """
        self._carry_out_orders(wait_s)
        self.boundary += 1
        if self._has_work and not self._stopping:
            self._step()

    @property
    def _is_settling(self) -> bool:
        """Whether a copy runs here whose move is not settled: the verdict on it is on its way."""
        return self._has_work and self._migrator is not None and self._migrator.is_busy

    @property
    def _has_work(self) -> bool:
        return self._host.engine is not None and self._host.engine.has_work

    def _carry_out_orders(self, wait_s: float | None) -> None:
        """Empty the mailbox; without work, sleep until something arrives."""
        while self._later:
            self._mailbox.put(self._later.pop(0))
        moving = self._migrator is not None and self._migrator.is_busy
        if not self._has_work:
            if self._is_stale:
                # its last sample has moved away: what it did for it would stay untold until there is work
                self._report_state()
            if moving and wait_s is None:
                wait_s = TICK_S
            if not moving and self._mailbox.empty():
                self._let_idle_work()
            with contextlib.suppress(queue.Empty):
                self._carry_out(*self._mailbox.get(block=wait_s != 0.0, timeout=wait_s or None))
        while not self._mailbox.empty():
            self._carry_out(*self._mailbox.get())
        if moving and self._migrator is not None:
            with self._counting_moves():
                self._migrator.tick()

    def _let_idle_work(self, *, end: bool = False) -> None:
        """Let what computes in idle time begin, or end within the operation under way; returns at once."""
        spot_trainer = self._host.spot_trainer
        if spot_trainer is not None:
            (spot_trainer.stop_soon if end else spot_trainer.allow)()

    def _carry_out(self, order: LoopOrder, future: Future) -> None:
        if isinstance(order, _NEEDS_THE_CORE):
            self._let_idle_work(end=True)
        logger.debug("%s, boundary %d: %s", self._instance, self.boundary, order)
        try:
            match order:
                case SubmitOrder() | CutOrder() | MoveEventOrder() if (
                    order.term is not None and order.term < self._term
                ):
                    # sent by a scheduler before its death, arrived after its successor asked what is held: void
                    future.set_result(None)
                case SubmitOrder():
                    self._submit(order)
                    future.set_result(None)
                case CutOrder():
                    self._cut(order.keys)
                    future.set_result(None)
                case LoadOrder() if self._is_settling:
                    self._later.append((order, future))
                case LoadOrder():
                    self._end_attempts(order.manifest)
                    future.set_result(
                        self._host.load_weights(order.manifest, order.chunks)
                        if order.group is None
                        else self._host.receive_weights(order.manifest, order.group)
                    )
                    self._report_state()
                case MoveEventOrder():
                    if self._migrator is None:
                        logger.error("instance %s moves no samples, but got: %s", self._instance, order)
                    else:
                        with self._counting_moves():
                            self._migrator.take(order.event, order.pieces)
                    future.set_result(None)
                case HoldOrder():
                    self._term = max(self._term, order.term)
                    if self._migrator is not None:
                        with self._counting_moves():
                            self._migrator.hold()
                    future.set_result(self._held())
                case CallOrder():
                    future.set_result(order.call())
                case RememberOrder():
                    self._host.remember(order.responses)
                    future.set_result(None)
                case StepLogOrder():
                    future.set_result(self._take_step_log())
                case StopOrder():
                    with self._changed:
                        self._stopping = True
                        self._changed.notify_all()
                    future.set_result(None)
        except RlhfSpecError as error:
            future.set_exception(error)
            if isinstance(order, MoveEventOrder):
                # nobody reads that answer, and a move left half done must not be decoded on
                raise
        except BaseException as error:
            future.set_exception(error)
            if isinstance(order, CallOrder) and isinstance(error, Exception):
                # who asked is told; no sample depends on it
                return
            raise

    def _submit(self, order: SubmitOrder) -> None:
        if self._host.engine is None:
            raise RlhfSpecError(
                f"instance {self._instance} got samples before its weights; publish weights first"
            )
        for request in order.requests:
            self._host.engine.submit(request)
            if not request.is_attempt:
                self.open_epochs[request.key] = request.epoch
        with self._changed:
            self._changed.notify_all()

    def _end_attempts(self, manifest: WeightManifest) -> None:
        """What was made ahead under the weights before is told, and drafted from under these."""
        engine = self._host.engine
        if engine is not None and manifest.model == "target" and (ended := engine.end_attempts()):
            self._report_state(ended)

    def _cut(self, keys: Collection[SampleKey]) -> None:
        """End these samples in the engine; one that is on its way comes up elsewhere, or here at a later order."""
        if not self._has_work:
            return
        engine = self._host.engine
        assert engine is not None
        if self._migrator is not None:
            # what has come in is claimed before it is told as ended
            self._migrator.before_step()
        self._ended_samples(ended := engine.cut(keys))
        if ended:
            self._report_state(ended)

    def _ended_samples(self, ended: Sequence[Completion]) -> None:
        """Forget samples that have ended here; who moves them is told."""
        ended = [completion for completion in ended if completion.epoch != ATTEMPT_EPOCH]
        for completion in ended:
            if self.open_epochs.get(completion.key) == completion.epoch:
                self.open_epochs.pop(completion.key)
        if ended and self._migrator is not None:
            with self._counting_moves():
                self._migrator.after_step(ended)
        if ended and self._host.spot_trainer is not None:
            self._host.spot_trainer.gather()

    @contextlib.contextmanager
    def _counting_moves(self) -> Iterator[None]:
        began_s = self._clock()
        try:
            yield
        finally:
            self._move_s += self._clock() - began_s

    def _take_step_log(self) -> list[StepRecord]:
        engine = self._host.engine
        if engine is None or engine.step_log is None:
            return []
        taken, engine.step_log = engine.step_log, []
        return taken

    def _held(self) -> HeldSamples:
        with self._changed:
            return HeldSamples(
                instance=self._instance,
                open_epochs=dict(self.open_epochs),
                completions=tuple(item for _, item in self._outbox if isinstance(item, Completion)),
                sequence=self._sequence,
                set_aside=dict(self._migrator.set_aside) if self._migrator else {},
            )

    def _step(self) -> None:
        engine = self._host.engine
        assert engine is not None
        if self._migrator is not None:
            with self._counting_moves():
                self._migrator.before_step()
        num_samples, context_tokens = engine.num_running, engine.num_context_tokens
        emitted_before = engine.num_emitted_tokens
        self._step_began_s = began_s = self._clock()
        finished = engine.step()
        self._ended_samples(finished)
        now_s = self._clock()
        self._step_began_s, self._is_stale = None, True
        batch, emitted = num_samples or engine.num_running, engine.num_emitted_tokens - emitted_before
        self.spans.add(
            "step", began_s, now_s, num_samples=batch, num_tokens=emitted, context_tokens=context_tokens
        )
        if not engine.has_work or now_s - self._published_at_s >= self._report_interval_s:
            self._report_state(finished)
        elif finished:
            # many samples end at once: what is told of the others may be a little old
            self._publish(self._published, finished)
            self._publish_s += self._clock() - now_s

    def _report_state(self, finished: Sequence[Completion] = ()) -> None:
        engine = self._host.engine
        if engine is None:
            return
        self._published_at_s, self._is_stale = self._clock(), False
        load = engine.load()
        load = replace(load, stats=replace(load.stats, move_s=self._move_s, publish_s=self._publish_s))
        self._publish(_Published(load=load, progress=engine.progress()), finished)
        self._on_report(load)
        self._publish_s += self._clock() - self._published_at_s

    def _publish(self, published: _Published, finished: Sequence[Completion]) -> None:
        with self._changed:
            self._published = published
            for completion in finished:
                self._sequence += 1
                self._outbox.append((self._sequence, completion))
            if finished:
                # nobody waits for anything else here, and to wake a thread takes long
                self._changed.notify_all()

    def _end(self, reason: BaseException) -> None:
        """Wake the pollers and refuse every order, those that wait included."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()
        for _, future in self._later:
            future.set_exception(reason)
        while not self._mailbox.empty():
            self._mailbox.get()[1].set_exception(reason)
