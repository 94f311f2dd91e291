"""A simulated pool: instances of rate curves behind the run's own scheduler, by a simulated clock.

The scheduler (`policies.scheduling`) binds, moves and resizes as in a run, by the run's own policies, from what
instances report; here is what carries its orders out, in the seconds that `PoolSetup` says they take.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np

from ...core.records import SampleKey
from ..migration.move_messages import Claim, MoveOrder, MoveReport
from ..reallocation.pool_records import MoveMode, ReallocationPolicy
from ..scaling.scaling_policy import ScalingPolicy
from ..scaling.scaling_records import Limits, Resize, Starts
from ..scheduling.events import (
    Deliver,
    Event,
    InstanceJoined,
    InstanceReported,
    Left,
    Order,
    Resized,
    SamplesArrived,
    StartMove,
    Submit,
)
from ..scheduling.look_ahead import LookAheadLaw
from ..scheduling.scheduler import Scheduler
from .simulated_instance import PaceLine, SimulatedInstance, TrainerWork
from .simulation_records import (
    Binding,
    PoolSetup,
    Samples,
    SimulationResult,
    completion_of,
    requests_of,
)

STARTS_A_PLACE = 4
"Instances that may start, over the most that a pool may have: one may leave and another come."


class Kind(IntEnum):
    """Events of one moment are handled in this order."""

    END = 0
    ARRIVE = 1
    JOIN = 2
    REPORT = 3
    MESSAGE = 4
    SUBMIT = 5
    ORDER = 6
    STARTED = 7
    LEARNED = 8
    LOADED = 9
    POLL = 10


def simulate(
    samples: Samples,
    setup: PoolSetup,
    policy: ReallocationPolicy | None,
    *,
    binding: Binding = "pull",
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Run all samples to their end.

    Args:
        samples: with their true lengths, which the policy does not see.
        setup: the pool.
        policy: asked at every poll; None moves nothing.
        binding: of samples to instances.
        progress: told the number of finished samples at every poll.
    """
    return SimulatedPool(samples, setup, policy, binding, progress).run()


class SimulatedPool:
    """The events of one rollout; `scheduled_run` has those of a run's phases, with updates beside them."""

    def __init__(
        self,
        samples: Samples,
        setup: PoolSetup,
        policy: ReallocationPolicy | None,
        binding: Binding,
        progress: Callable[[int], None] | None,
        look_ahead: LookAheadLaw | None = None,
    ) -> None:
        self._samples, self._setup, self._progress = samples, setup, progress
        # samples that are bound beforehand leave nothing for whoever comes later
        elastic = self._elastic = setup.elastic if binding == "pull" else None
        self._scheduler = Scheduler(
            heartbeat_timeout_s=math.inf,
            binding=binding,
            reallocation=policy,
            look_ahead=look_ahead,
            scaling=elastic
            and ScalingPolicy(
                setup.curve.copy(),
                Limits(least=elastic.least, most=elastic.most, idle_timeout_s=elastic.idle_timeout_s),
            ),
        )
        self._now_s = 0.0
        self._line = PaceLine.of(setup.curve, setup.num_slots)
        self._alone_line = setup.alone_curve and PaceLine.of(setup.alone_curve, setup.num_slots)
        self._known_paces: dict[float, PaceLine] = {1.0: self._line}
        self._instances: dict[str, SimulatedInstance] = {}
        self._since_s: dict[str, float] = {}
        "from an instance's start, that of its process included"
        self._until_s: dict[str, float] = {}
        self._ended: set[int] = set()
        self._between: dict[int, tuple[float, float]] = {}
        "samples on their way from one instance to another: what each still needs, and its context tokens"
        self._requests = requests_of(samples, setup.max_new_tokens)
        "of each sample, under the epoch that it has where it is"
        self._to_go = samples.response_tokens / samples.speed + setup.last_step_tokens
        self._until, self._speed = samples.response_tokens, samples.speed
        self._learner = TrainerWork()
        self._factor = 1.0 if setup.machine is None else setup.machine.factor(setup.num_instances)
        "how many times as long everything takes now as with one at work"
        self._learning = 0
        "counts changes of what was expected of the trainer"
        self._learner_done_s = 0.0
        self._warm: set[tuple[str, str]] = set()
        self._events: list[tuple[float, Kind, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = self._num_done = 0
        self._counts = Counter[str]()
        self._resizes: list[tuple[float, Resize]] = []

    def run(self) -> SimulationResult:
        """Handle events until the last sample is done."""
        for _ in range(self._setup.num_instances):
            self._started(self._new_name())
        self._begin_run()
        self._share_machine()
        self._at(self._setup.poll_interval_s, Kind.POLL, self._poll)
        while not self._is_over():
            self._now_s, _, _, happens, what = heapq.heappop(self._events)
            self._learner.advance(self._now_s, self._factor)
            happens(*what)
            if self._alone_line is not None or self._setup.machine is not None:
                self._share_machine()
        for instance in self._instances.values():
            instance.advance(self._now_s)
        until = (self._until_s.get(name, self._now_s) - since for name, since in self._since_s.items())
        return SimulationResult(
            finish_s=self._now_s,
            busy_s=np.array([instance.busy_s for instance in self._instances.values()]),
            num_tokens=int(self._samples.response_tokens.sum()),
            num_moves=self._counts["moves"],
            num_migrated=self._counts["migrated"],
            num_recomputed=self._counts["recomputed"],
            num_void=self._counts["void"],
            instance_s=sum(until),
            learner_end_s=self._learner_end_s(),
            resizes=tuple(self._resizes),
        )

    def _begin_run(self) -> None:
        """What there is at the start."""
        self._ask(range(len(self._samples)))

    def _is_over(self) -> bool:
        return self._num_done == len(self._samples)

    def _delivered(self, sample: int) -> None:
        """The scheduler hands a whole sample on."""
        del sample
        self._num_done += 1

    # events and orders

    def _at(self, at_s: float, kind: Kind, happens: Callable[..., None], *what: object) -> None:
        heapq.heappush(self._events, (at_s, kind, self._num_events, happens, what))
        self._num_events += 1

    def _ask(self, samples: Iterable[int]) -> None:
        self._send(SamplesArrived(requests=tuple(self._requests[sample] for sample in samples)))

    def _send(self, event: Event) -> None:
        self._carry_out(self._scheduler.handle(event))

    def _say(self, instance: str, **what: Any) -> None:
        """An instance tells the scheduler something, in a message."""
        if self._setup.message_s:
            self._at(self._now_s + self._setup.message_s, Kind.MESSAGE, self._receive, instance, what)
        else:
            self._receive(instance, what)

    def _receive(self, instance: str, what: dict[str, Any]) -> None:
        self._send(InstanceReported(instance=instance, now_s=self._now_s, **what))

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            match order:
                case Submit():
                    self._at(self._now_s + self._setup.message_s, Kind.SUBMIT, self._submit, order)
                case Deliver():
                    self._delivered(order.completion.key.sample_index)
                case StartMove():
                    self._at(self._now_s + self._setup.order_delay_s, Kind.ORDER, self._move, order.order)
                case Resized():
                    self._resize(order.change)
                case Left():
                    self._until_s[order.instance] = self._now_s

    def _poll(self) -> None:
        if self._progress is not None:
            self._progress(self._num_done)
        for name in self._scheduler.members.serving:
            instance = self._instances[name]
            instance.advance(self._now_s)
            self._receive(name, {"progress": self._tokens_so_far(instance), "load": instance.load()})
        if self._elastic is not None:
            staying = [*self._scheduler.members.serving.keys() - self._scheduler.members.leaving.keys()]
            starts = Starts(
                num_starting=self._num_starting,
                start_up_s=self._elastic.start_up_s,
                rollouts_ahead=self._elastic.rollouts_ahead,
                is_blocked=len(self._since_s)
                >= self._setup.num_instances + STARTS_A_PLACE * self._elastic.most,
            )
            self._scheduler.expect(starts, may_leave=sorted(staying)[self._elastic.least :])
        self._carry_out(self._scheduler.reallocate(self._now_s))
        self._at(self._now_s + self._setup.poll_interval_s, Kind.POLL, self._poll)

    def tokens_so_far(self) -> dict[int, int]:
        """Tokens of the samples that have begun and have neither ended nor been handed on."""
        here = [each for one in self._instances.values() for each in self._tokens_so_far(one).items()]
        away = self._samples.prompt_tokens
        return {key.sample_index: tokens for key, tokens in here} | {
            sample: int(context + 1e-6) - int(away[sample]) for sample, (_, context) in self._between.items()
        }

    def _tokens_so_far(self, instance: SimulatedInstance) -> dict[SampleKey, int]:
        here = np.fromiter(instance.running, dtype=np.int64)
        to_go = np.fromiter(instance.running.values(), dtype=float) - instance.progress
        # what is not quite done has not ended
        left = np.ceil(to_go * self._speed[here] - 1e-9)
        done = np.maximum(self._until[here] - left, 0.0).astype(np.int64)
        keys = (self._requests[sample].key for sample in here.tolist())
        return dict(zip(keys, done.tolist(), strict=True))

    # the pool's size

    @property
    def _num_starting(self) -> int:
        return len(self._since_s) - len(self._instances)

    def _new_name(self) -> str:
        name = f"gen-{len(self._since_s):04d}"
        self._since_s[name] = self._now_s
        return name

    def _started(self, name: str) -> None:
        self._instances[name] = SimulatedInstance(
            name, self._line, self._setup.moves.bystander_share, now_s=self._now_s
        )
        self._send(InstanceJoined(instance=name, num_slots=self._setup.num_slots, now_s=self._now_s))

    def _resize(self, change: Resize) -> None:
        assert self._elastic is not None
        self._resizes.append((self._now_s, change))
        members = self._scheduler.members
        staying = len(members.serving) - len(members.leaving)
        for _ in range(change.target - staying - self._num_starting):
            self._at(self._now_s + self._elastic.start_up_s, Kind.STARTED, self._started, self._new_name())

    # samples

    def _submit(self, order: Submit) -> None:
        instance = self._instances[order.instance]
        for request in order.requests:
            self._requests[request.key.sample_index] = request
            instance.waiting.append(request.key.sample_index)
        self._start_next(instance)

    def _start_next(self, instance: SimulatedInstance) -> None:
        """Samples in line take the slots that are free."""
        if not instance.waiting:
            return
        instance.advance(self._now_s)
        while instance.waiting and self._has_slot(instance):
            sample = instance.waiting.popleft()
            prompt_s = self._prompt_s(sample)
            if prompt_s > 0 and not self._shares_prompt(sample, instance):
                instance.block(prompt_s)
            self._add(
                instance, sample, float(self._to_go[sample]), float(self._samples.prompt_tokens[sample])
            )
        self._reschedule(instance)

    def _has_slot(self, instance: SimulatedInstance) -> bool:
        return len(instance.running) + instance.num_reserved < self._setup.num_slots

    def _prompt_s(self, sample: int, context_tokens: float | None = None) -> float:
        """Seconds of the sample's prompt, or of more of its tokens."""
        tokens = float(self._samples.prompt_tokens[sample]) if context_tokens is None else context_tokens
        return (tokens * self._setup.prompt_token_s + self._setup.prompt_s) * self._stretch

    def _shares_prompt(self, sample: int, instance: SimulatedInstance) -> bool:
        """Whether another sample of the prompt runs there, whose caches are copied."""
        group = self._samples.group
        if group is None or group[sample] < 0:
            return False
        return any(group[other] == group[sample] for other in instance.running)

    def _add(self, instance: SimulatedInstance, sample: int, to_go: float, context_tokens: float) -> None:
        instance.add(sample, to_go, context_tokens=context_tokens, speed=float(self._speed[sample]))

    def _reschedule(self, instance: SimulatedInstance) -> None:
        """The instance has changed: what was expected of it no longer holds."""
        instance.num_changes += 1
        following = instance.next_end()
        if following is not None:
            self._at(following[0], Kind.END, self._end, instance, following[1], instance.num_changes)

    def _end(self, instance: SimulatedInstance, sample: int, num_changes: int) -> None:
        if num_changes != instance.num_changes:
            return
        instance.advance(self._now_s)
        instance.remove(sample)
        self._reschedule(instance)
        self._start_next(instance)
        self._ended.add(sample)
        instance.unreported.append(sample)
        is_last = not instance.running and not instance.waiting
        if is_last or not self._setup.report_interval_s:
            self._report(instance)
        elif len(instance.unreported) == 1:
            at_s = max(self._now_s, instance.reported_s + self._setup.report_interval_s)
            self._at(at_s, Kind.REPORT, self._report, instance)

    def _report(self, instance: SimulatedInstance) -> None:
        """An instance tells what has ended there."""
        ended, instance.unreported = instance.unreported, []
        if ended:
            instance.reported_s = self._now_s
            lengths = self._samples.response_tokens[ended].tolist()
            self._say(
                instance.name,
                completions=tuple(
                    completion_of(self._requests[sample], length, instance.name)
                    for sample, length in zip(ended, lengths, strict=True)
                ),
            )

    # moves

    def _move(self, order: MoveOrder) -> None:
        """Begin a move; the source keeps a sample that has ended, or that finds no slot."""
        here, there = self._instances[order.source], self._instances[order.destination]
        sample, truth = order.key.sample_index, self._setup.moves
        waits = sample in here.waiting
        if not (waits or sample in here.running) or not self._has_slot(there):
            self._claim(Claim.KEPT, order, order.epoch)
            return
        self._counts["moves"] += 1
        there.num_reserved += 1
        here.advance(self._now_s)
        there.advance(self._now_s)
        if order.mode is MoveMode.MIGRATE and not waits:
            pair = (order.source, order.destination)
            # whole tokens; sums of times may fall just short of one
            num_bytes = int(int(here.context_of(sample) + 1e-6) * truth.kv_bytes_per_token)
            cold = pair not in self._warm
            seconds = float(truth.transfer.seconds(num_bytes, cold=cold))
            self._warm.add(pair)
            here.num_transfers += 1
            there.num_transfers += 1
            metrics = {
                "stage1_bytes": num_bytes,
                "stage2_bytes": 0,
                "stage1_s": seconds,
                "downtime_s": truth.downtime_s,
                "was_cold": cold,
            }
            self._at(self._now_s + seconds, Kind.ARRIVE, self._arrive, order, metrics)
            self._reschedule(here)
            self._reschedule(there)
            return
        self._counts["recomputed"] += 1
        if waits:
            here.waiting.remove(sample)
            left = (float(self._to_go[sample]), float(self._samples.prompt_tokens[sample]))
            seconds = self._prompt_s(sample)
        else:
            seconds = float(truth.prefill.seconds(int(here.context_of(sample) + 1e-6)))
            left = here.remove(sample)
        self._between[sample] = left
        metrics = {"computed_tokens": int(left[1] + 1e-6), "attach_s": seconds}
        self._at(there.block(seconds), Kind.JOIN, self._join, order, metrics)
        self._reschedule(there)
        self._reschedule(here)
        self._start_next(here)

    def _arrive(self, order: MoveOrder, metrics: dict[str, float]) -> None:
        """The caches of a migration are there: hand over, if there still is anything to."""
        here, there = self._instances[order.source], self._instances[order.destination]
        sample = order.key.sample_index
        for instance in (here, there):
            instance.advance(self._now_s)
            instance.num_transfers -= 1
        if sample in here.running:
            self._counts["migrated"] += 1
            self._between[sample] = here.remove(sample)
            at_s = self._now_s + self._setup.moves.downtime_s
            self._at(at_s, Kind.JOIN, self._join, order, metrics)
            self._start_next(here)
        else:
            self._counts["void"] += 1
            there.num_reserved -= 1
            self._start_next(there)
        self._reschedule(here)
        self._reschedule(there)

    def _join(self, order: MoveOrder, metrics: dict[str, float]) -> None:
        there, sample = self._instances[order.destination], order.key.sample_index
        there.advance(self._now_s)
        there.num_reserved -= 1
        self._add(there, sample, *self._between.pop(sample))
        self._reschedule(there)
        self._requests[sample] = replace(self._requests[sample], epoch=order.epoch + 1)
        self._claim(Claim.COMMIT, order, order.epoch + 1, metrics)

    def _claim(
        self, claim: Claim, order: MoveOrder, epoch: int, metrics: dict[str, float] | None = None
    ) -> None:
        report = MoveReport(
            claim=claim,
            move_id=order.move_id,
            key=order.key,
            epoch=epoch,
            source=order.source,
            destination=order.destination,
            metrics=metrics,
        )
        self._say(order.destination if claim is Claim.COMMIT else order.source, moves=(report,))

    # the machine and the trainer

    def _share_machine(self) -> None:
        """Instances and trainer are as fast as the others let them."""
        num_busy = sum(instance.is_busy(self._now_s) for instance in self._instances.values())
        machine, line = self._setup.machine, self._line
        if machine is not None:
            factor = machine.factor(num_busy, trainer=self._learner.is_busy)
            if factor != self._factor:
                self._factor = factor
                self._expect_learner()
            line = self._known_paces.setdefault(self._stretch, self._line.times(self._stretch))
        for instance in self._instances.values():
            own = line
            if self._alone_line is not None and num_busy == 1 and instance.running:
                own = self._alone_line
            if own is not instance.line:
                instance.advance(self._now_s)
                instance.line = own
                self._reschedule(instance)

    @property
    def _stretch(self) -> float:
        """How many times as long everything takes as in the setup, whose seconds are of all instances busy."""
        machine = self._setup.machine
        return 1.0 if machine is None else self._factor / machine.factor(self._setup.num_instances)

    def _learn(self, seconds: float) -> None:
        """The trainer begins an update."""
        self._learner.begin(self._now_s, seconds)
        self._expect_learner()

    def _expect_learner(self) -> None:
        self._learning += 1
        if self._learner.is_busy:
            self._at(self._learner.end_s(self._factor), Kind.LEARNED, self._learned, self._learning)

    def _learned(self, expected: int) -> None:
        if expected == self._learning:
            self._learner_done_s = self._now_s
            self._learner.begin(self._now_s, 0.0)

    def _learner_end_s(self) -> float:
        if not self._learner.is_busy:
            return self._learner_done_s
        self._learner.advance(self._now_s, self._factor)
        machine = self._setup.machine
        return self._learner.end_s(1.0 if machine is None else machine.factor(0, trainer=True))
