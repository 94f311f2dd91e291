"""A pool of instances that generates for whoever asks: one thread owns scheduler client and pool, as a run's loop does.

An instance that dies costs no sample: the scheduler queues its samples again, to the same tokens, and the pool replaces
it. New weights come between samples: those that run end first, or are cut and go on with the new version.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray

from ...core.decode_records import GenerationStats
from ...core.errors import ModelError, describe_error
from ...core.records import (
    EPOCHS_OF_A_ROUND,
    Completion,
    FinishReason,
    SampleKey,
    SampleRequest,
    Scores,
    as_asked,
)
from ..plan.run_plan import RunPlan
from ..ray_start.ray_session import RaySession
from ..system.system import GeneratingSystem, running_generation
from ..weights.publish import PublishedWeights
from .api_error import ApiError
from .outcome_check import MOST_BYTES, OutcomeCheck

logger = logging.getLogger(__name__)
PauseMode = Literal["abort", "wait", "keep"]
"What becomes of running samples: they end where they are, end whole, or wait and go on at the resumption."
_LOOK_S = 0.1
"The scheduler answers so often at least; also between two questions of what there is of streamed samples."
_LATE_S = 10 * _LOOK_S
"One that is silent for so long is waited for, and replaced in the end."

Outcome = tuple[Completion, bool]
"A response, and whether it has ended."


@dataclass(slots=True, kw_only=True)
class _Sample:
    """One that is open, waits, or is held."""

    request: SampleRequest
    tell: Callable[[Outcome | ApiError], None]
    streams: bool
    num_top: int | None = None
    "scored once it is sampled, with so many of the likeliest tokens; None: it is not"
    sampled: Completion | None = None
    "while it is scored"
    is_given_up: bool = False
    "nobody waits for it any more"


@dataclass(slots=True)
class _Change:
    """What waits until no sample is open."""

    make: Callable[[GeneratingSystem], None]
    done: Future[None]


class EnginePool:
    """Of one model; `generate` and the like are called from one event loop."""

    def __init__(
        self, plan: RunPlan, session: RaySession, note: Callable[[str], None] = logger.warning
    ) -> None:
        """Start the pool, of which `note` hears. Raises what it cannot come up by."""
        self._tell, self._check = note, OutcomeCheck(plan)
        self._inbox: queue.SimpleQueue[list[_Sample] | Callable[[], None]] = queue.SimpleQueue()
        self._gate, self._is_closed = threading.Lock(), False
        self._waiting: deque[_Sample] = deque()
        self._to_score: list[_Sample] = []
        "of those that are open: no change of weights comes between"
        self._open: dict[SampleKey, _Sample] = {}
        self._changes: deque[_Change] = deque()
        self._is_paused, self._is_aborting = False, False
        self._partial: list[Any] = []
        self._asked_parts_at_s = 0.0
        self._round = 0
        self._stopping = False
        self._failure: BaseException | None = None
        self.num_open = 0
        "samples asked for and not answered; of the event loop's thread"
        self.stats, self.num_instances, self.weight_version = GenerationStats(), 0, 0
        up: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(plan, session, up), name="engine-pool", daemon=True
        )
        self._thread.start()
        up.result()

    @property
    def failure(self) -> BaseException | None:
        """What ended the pool."""
        return self._failure

    @property
    def target(self) -> PublishedWeights:
        """The version that instances decode from."""
        return self._system.target

    @property
    def is_paused(self) -> bool:
        """Whether samples wait for a resumption."""
        return self._is_paused

    def generate(
        self, requests: Sequence[SampleRequest], *, streams: bool, num_top: int | None = None
    ) -> AsyncGenerator[tuple[int, Completion, bool]]:
        """(place, response, whether it has ended), ended once each; what there is so far too where it `streams`.

        With `num_top` they are scored, too (`Completion.scores`).

        They are open from this call on. Who leaves the iteration gives up those that have not ended.
        Raises ApiError where a sample cannot be generated.
        """
        loop = asyncio.get_running_loop()
        unread: dict[int, Outcome | ApiError] = {}
        is_new = asyncio.Event()

        def take(place: int, outcome: Outcome | ApiError) -> None:
            # here, not where it is read: a client that is gone reads nothing
            self.num_open -= isinstance(outcome, ApiError) or outcome[1]
            # in the place of one that is unread: a slow reader costs one response each
            unread[place] = outcome
            is_new.set()

        samples = [
            _Sample(request=request, tell=_teller(loop, take, place), streams=streams, num_top=num_top)
            for place, request in enumerate(requests)
        ]
        # in one piece: they begin together
        self._put(samples)
        self.num_open += len(samples)
        return self._outcomes(samples, unread, is_new)

    async def _outcomes(
        self, samples: list[_Sample], unread: dict[int, Outcome | ApiError], is_new: asyncio.Event
    ) -> AsyncGenerator[tuple[int, Completion, bool]]:
        missing = len(samples)
        try:
            while missing:
                await is_new.wait()
                is_new.clear()
                while unread:
                    place = next(iter(unread))
                    outcome = unread.pop(place)
                    if isinstance(outcome, ApiError):
                        raise outcome
                    missing -= outcome[1]
                    yield place, *outcome
        finally:
            if missing:
                with suppress(ApiError):  # it has ended, and they with it
                    self._put(lambda: self._give_up(samples))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Take no further samples; done when none is open."""

        def begin() -> None:
            self._is_paused, self._is_aborting = True, mode == "abort"
            self._changes.append(_Change(self._end_aborting, done))
            if mode != "wait" and self._open:
                self._system.scheduler.cut()

        done: Future[None] = Future()
        self._put(begin)
        return done

    def resume(self) -> None:
        """Take samples again."""

        def end() -> None:
            self._is_paused = False

        self._put(end)

    def publish(self, weights: PublishedWeights) -> Future[None]:
        """Give every instance a new version once the samples that run have ended; those that wait get it.

        Done with a ModelError where the pool does not say what the weights say: it has those before again.
        """

        def give(system: GeneratingSystem, weights: PublishedWeights) -> None:
            system.generation.publish(weights)
            system.target = weights

        def make(system: GeneratingSystem) -> None:
            before = system.target
            give(system, weights)
            try:
                self._require_right(system)
            except ModelError:
                give(system, before)
                raise

        change = _Change(make, Future())
        self._put(lambda: self._changes.append(change))
        return change.done

    def stop(self) -> None:
        """Answer what is open as retriable, and end the instances."""
        self._stopping = True
        self._wake()
        self._thread.join()

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._unavailable()

    def _put(self, given: list[_Sample] | Callable[[], None]) -> None:
        """Hand it to the thread. Raises ApiError where that has ended."""
        with self._gate:
            self._require_open()
            self._inbox.put(given)

    def _wake(self, *_: Any) -> None:
        self._inbox.put(list[_Sample]())

    def _run(self, plan: RunPlan, session: RaySession, up: Future[None]) -> None:
        try:
            with running_generation(plan, session, note=self._tell) as system:
                self._system = system
                self._tell("comparing a greedy response with transformers' own forward")
                self._require_right(system)
                self._note(system)
                up.set_result(None)
                while not self._stopping:
                    self._step(system)
        except BaseException as error:
            self._failure = error
            if not up.done():
                up.set_exception(error)
            logger.exception("the pool of instances has ended")
        finally:
            self._fail_all()

    def _step(self, system: GeneratingSystem) -> None:
        """Do what is asked for, or was answered; nothing that is asked for waits for the scheduler's answer."""
        system.scheduler.ask_ahead(_LOOK_S, self._wake)
        self._receive(wait_s=_LATE_S)
        if system.scheduler.has_answered(late_s=_LATE_S):
            taken = system.take(_LOOK_S, self._tell)
            for completion in taken.completions:
                self._deliver(completion)
            system.scheduler.forget([completion.key for completion in taken.completions])
        while self._changes and not self._open:
            self._make(self._changes.popleft())
        self._ask(system)
        self._look_at_parts(system)
        self._note(system)

    @property
    def _is_held(self) -> bool:
        return self._is_paused or bool(self._changes)

    def _receive(self, *, wait_s: float) -> None:
        """Take what was asked for since the last call, waiting at most so long for it."""
        is_any = False
        with suppress(queue.Empty):
            while True:
                given = self._inbox.get(block=not is_any and wait_s > 0.0, timeout=wait_s or None)
                is_any = True
                if isinstance(given, list):
                    self._waiting += given
                else:
                    given()

    def _make(self, change: _Change) -> None:
        try:
            change.make(self._system)
        except ModelError as error:
            change.done.set_exception(error)
            return
        except BaseException as error:
            change.done.set_exception(error)
            raise
        change.done.set_result(None)

    def _require_right(self, system: GeneratingSystem) -> None:
        """Raise ModelError where the pool does not say what its weights say. No sample may be open."""
        manifest = system.target.manifest
        if manifest.weight_version and manifest.num_bytes > MOST_BYTES:
            return self._tell(f"weight version {manifest.weight_version} is not compared: over 8 GiB")
        self._round += 1
        request = self._check.request(self._round * EPOCHS_OF_A_ROUND)
        system.scheduler.enqueue((request,))
        while not self._stopping:
            for said in system.take(_LOOK_S, self._tell).completions:
                system.scheduler.forget([said.key])
                if said.key == request.key:
                    if fault := self._check.fault(system.target, said):
                        raise ModelError(
                            f"the instances do not say what their weights say: {fault}; report it"
                        )
                    return

    def _ask(self, system: GeneratingSystem) -> None:
        """Hand what waits to the scheduler; a sample whose key is open waits for the other to end."""
        asked, self._to_score, left = self._to_score, [], deque[_Sample]()
        while self._waiting and not self._is_held:
            sample = self._waiting.popleft()
            is_free = self._open.setdefault(sample.request.key, sample) is sample
            (asked if is_free else left).append(sample)
        self._waiting.extendleft(reversed(left))
        if not asked:
            return
        # the scheduler takes a key again under the epochs of a later round alone
        self._round += 1
        for sample in asked:
            sample.request = replace(sample.request, epoch=self._round * EPOCHS_OF_A_ROUND)
        system.scheduler.enqueue(tuple(sample.request for sample in asked))

    def _give_up(self, samples: list[_Sample]) -> None:
        """End those that are open and those that wait; a sample that has ended is neither."""
        for sample in samples:
            sample.is_given_up = True
        for sample in [one for one in self._waiting if one.is_given_up]:
            self._waiting.remove(sample)
            sample.tell((as_asked(sample.request), True))
        if keys := frozenset(key for key, one in self._open.items() if one.is_given_up):
            self._system.scheduler.cut(keys)

    def _deliver(self, completion: Completion) -> None:
        sample, is_cut = self._open.pop(completion.key), completion.finish_reason is FinishReason.CUT
        history = completion.as_history() if completion.num_tokens else None
        if is_cut and not (sample.sampled or self._is_aborting or sample.is_given_up):
            sample.request = replace(sample.request, history=history)
            self._waiting.appendleft(sample)
        elif sample.num_top is None or sample.is_given_up:
            sample.tell((completion, True))
        elif completion.scores is None:
            sample.sampled = sample.sampled or completion
            sample.request = replace(sample.request, history=history, num_top=sample.num_top)
            self._open[completion.key] = sample
            self._to_score.append(sample)
        else:
            sample.tell(_with_scores(sample.sampled or completion, completion.scores))

    def _look_at_parts(self, system: GeneratingSystem) -> None:
        """Tell streams what there is of their samples, whichever instance has them."""
        ready, self._partial = (
            ray.wait(self._partial, num_returns=len(self._partial), timeout=0) if self._partial else ([], [])
        )
        for ref in ready:
            try:
                found: tuple[Completion, ...] = ray.get(ref)
            except Exception as error:  # one that dies says no more; its samples come from another
                logger.info("no parts of streams from an instance: %s", error)
                continue
            for completion in found:
                sample = self._open.get(completion.key)
                # a late one may be of a sample before it with this key, from other weights
                if sample is not None and completion.epoch >= sample.request.epoch:
                    sample.tell((completion, False))
        now_s = time.monotonic()
        keys = frozenset(key for key, sample in self._open.items() if sample.streams)
        if keys and not self._partial and now_s - self._asked_parts_at_s >= _LOOK_S:
            self._asked_parts_at_s = now_s
            timeout_s = system.config.cluster.order_timeout_s
            self._partial = [
                handle.so_far.remote(keys, timeout_s) for handle in system.generation.instances.values()
            ]
            for ref in self._partial:
                ref.future().add_done_callback(self._wake)

    def _note(self, system: GeneratingSystem) -> None:
        self.stats, self.num_instances = system.scheduler.stats, len(system.generation.instances)
        self.weight_version = system.target.manifest.weight_version

    def _end_aborting(self, system: GeneratingSystem) -> None:
        while self._is_aborting and self._waiting:
            sample = self._waiting.popleft()
            sample.tell((as_asked(sample.request), True))
        self._is_aborting = False

    def _unavailable(self) -> ApiError:
        why = "it is stopped" if self._failure is None else describe_error(self._failure)
        return ApiError(
            503, f"the pool of instances has ended: {why}; send the request again", code="unavailable"
        )

    def _fail_all(self) -> None:
        """Answer what is left as retriable."""
        with self._gate:
            self._is_closed, error = True, self._unavailable()
        # first: what is received must not ask a scheduler that is gone for them
        opened, self._open = self._open, {}
        self._receive(wait_s=0.0)
        for sample in (*opened.values(), *self._waiting):
            sample.tell(error)
        for change in self._changes:
            change.done.set_exception(error)
        self._waiting.clear()


def _with_scores(sampled: Completion, scores: Scores) -> Outcome | ApiError:
    """A response with its scores, where one version of the weights gave both."""
    if {span.weight_version for span in sampled.weight_spans} <= {scores.weight_version}:
        return replace(sampled, scores=scores), True
    return ApiError(
        503,
        "new weights came while a response ran whose other log-probabilities were asked for (logprobs, top_logprobs); "
        "send the request again",
        code="unavailable",
    )


def _teller(
    loop: asyncio.AbstractEventLoop, take: Callable[[int, Outcome | ApiError], None], place: int
) -> Callable[[Outcome | ApiError], None]:
    """What hands an outcome from the pool's thread to the event loop's."""
    return lambda outcome: loop.call_soon_threadsafe(take, place, outcome) and None
