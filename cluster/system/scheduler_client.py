"""The loop's side of the scheduler: one method a wish, and a new scheduler when one dies.

What a scheduler must know after its predecessor's death is kept here: what was asked for since nothing was open,
what of it has been delivered. Which instances have joined, the table says. A wish is noted before it is sent, so a
scheduler that is rebuilt from the notes and from what the instances hold has carried it out. What a
dead scheduler had received and not handed on is generated again, to the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray

from ...actors.actor_messages import HeldSamples, LostInstance, Rejoined, SchedulerSettings, Taken
from ...actors.remote import run_metrics
from ...actors.remote.remote import Handle
from ...actors.remote.restart_budget import RestartBudget
from ...actors.remote.waiting import ActorDied, awake_s, get
from ...core.decode_records import GenerationStats
from ...core.errors import InstanceLost, SchedulerLost, WaitTimeout
from ...core.records import Completion, SampleKey, SampleRequest
from ...policies.scaling.scaling_records import Starts
from ...policies.scheduling.attempts import AttemptCounts
from ...policies.scheduling.members import InstanceState
from .instance_table import InstanceTable

SCHEDULER = "scheduler"
_GRACE_S = 5.0
"The caller waits longer than the instance, so that the instance's own message arrives."


class SchedulerClient:
    """Owns the scheduler actor of one run; to be used from one thread."""

    def __init__(
        self,
        make: Callable[[SchedulerSettings], Handle],
        settings: SchedulerSettings,
        instances: InstanceTable,
        *,
        max_restarts: int,
        start_timeout_s: float,
    ) -> None:
        """Start the first scheduler. `make` starts an actor whose name no earlier term has used.

        `max_restarts` within an hour are made.
        """
        self._make = make
        self._settings = settings
        self._instances = instances
        self._budget = RestartBudget(max_restarts)
        self._start_timeout_s = start_timeout_s
        # it answers everything at once: one that does not is frozen, and no order makes it slow
        self._answers_within_s = min(settings.heartbeat_timeout_s + _GRACE_S, settings.order_timeout_s)
        self._asked: dict[SampleKey, SampleRequest] = {}
        self._delivered: dict[SampleKey, Completion] = {}
        self._lost: list[LostInstance] = []
        self._updates: list[str] = []
        self._is_cut, self._cut_keys = False, set[SampleKey]()
        "what is open was told to end where it is"
        self._expected: tuple[Starts, tuple[str, ...]] = (Starts(), ())
        self._planning_s = 0.0
        self._planning_before_s = 0.0
        self._attempts = self._attempts_before = AttemptCounts()
        self._ahead: Any = None
        "a `take` on its way: the future of its answer"
        self._asked_at_s = 0.0
        self._proving_cost = 0.0
        self._handle = make(settings)
        self._sentinel = self._handle.run.remote()

    @property
    def handle(self) -> Handle:
        """The actor now in office."""
        return self._handle

    @property
    def stats(self) -> GenerationStats:
        """Sums over all instances since the run began, lost ones included, as of the last `take`."""
        return self._instances.stats

    @property
    def planning_s(self) -> float:
        """Seconds spent on deciding moves since the run began, by all schedulers, as of the last `take`."""
        return self._planning_before_s + self._planning_s

    def join(self, instance: str) -> None:
        """Add an instance of the table whose weights have been confirmed. Raises SchedulerLost."""
        row = self._instances[instance]
        row.state = InstanceState.SERVING
        self._send("join", instance, row.handle, row.num_slots)

    def lose(self, instance: str, reason: str) -> str:
        """Give an instance up whose load failed; why it is lost, as who saw it first says. Raises SchedulerLost."""
        self._instances[instance].state = InstanceState.GONE
        return self._send("lose", instance, reason) or reason

    def leave(self, instance: str, reason: str) -> None:
        """Have an instance emptied; `take` tells when it may be ended. Raises SchedulerLost."""
        row = self._instances[instance]
        row.state, row.leaves_because = InstanceState.LEAVING, reason
        self._send("leave", instance, reason)

    def expect(self, starts: Starts, may_leave: tuple[str, ...]) -> None:
        """Tell what is on its way, and whose places can be given back. Raises SchedulerLost."""
        if (starts, may_leave) != self._expected:
            self._expected = (starts, may_leave)
            self._send("expect", starts, may_leave)

    def enqueue(self, requests: tuple[SampleRequest, ...]) -> None:
        """Ask for new samples; they complete through `take`. Raises SchedulerLost."""
        if len(self._delivered) == len(self._asked):
            self._asked.clear()
            self._delivered.clear()
            self._cut_keys.clear()
            self._is_cut = False
        self._asked.update((request.key, request) for request in requests)
        self._send("enqueue", requests)

    def look_ahead(self, requests: tuple[SampleRequest, ...]) -> None:
        """Tell of the next batch's samples, which may be begun in free slots; of none: new weights are published.

        Raises SchedulerLost. It is no wish: a new scheduler knows nothing of it, and nothing is lost.
        """
        self._send("look_ahead", requests)

    def attempt_metrics(self) -> dict[str, float]:
        """What became of attempts since the last call, as of the last `take`; nothing where there are none."""
        done, self._attempts_before = self._attempts - self._attempts_before, self._attempts
        if self._settings.look_ahead is None:
            return {}
        metrics = {
            "rollout/num_attempts": float(done.num_attempts),
            "rollout/attempted_tokens": float(done.num_attempted_tokens),
            "rollout/num_attempt_drafts": float(done.num_drafts),
            "rollout/proving_cost": self._proving_cost,
        }
        if done.num_draft_tokens:
            metrics["rollout/attempts_proved"] = done.num_proved_tokens / done.num_draft_tokens
        return metrics

    def cut(self, keys: frozenset[SampleKey] | None = None) -> None:
        """Have samples end where they are; `take` brings what there is of each. Raises SchedulerLost.

        `keys`: of those samples; None: all that are open.
        """
        self._is_cut |= keys is None
        self._cut_keys |= keys or frozenset()
        self._send("cut", keys)

    def ask_ahead(self, wait_s: float, then: Callable[[], None]) -> None:
        """Have a `take` on its way, unless one is; `then` is called, on a thread of Ray's, when its answer is there."""
        if self._ahead is None:
            self._ahead = self._handle.take.remote(wait_s).future()
            self._asked_at_s = time.monotonic()
            self._ahead.add_done_callback(lambda _: then())

    def has_answered(self, *, late_s: float) -> bool:
        """Whether what was asked ahead is answered, or should be by now: then `take` waits, and replaces in the end."""
        is_late = time.monotonic() - self._asked_at_s >= late_s
        return self._ahead is not None and (self._ahead.done() or is_late)

    def take(self, wait_s: float, gathers: bool = False) -> Taken:
        """Return the updates since the last call, waiting up to `wait_s` for some, or to gather completions.

        Raises what made generation impossible; SchedulerLost when no restart is left.
        """
        ahead, self._ahead = self._ahead, None
        taken = self._send("take", wait_s, gathers, ref=ahead and ahead.object_ref) or Taken()
        self._planning_s, self._attempts = taken.planning_s, taken.attempts
        self._proving_cost = taken.proving_cost
        self._delivered.update((completion.key, completion) for completion in taken.completions)
        for name, stats in taken.stats.items():
            if name in self._instances:
                self._instances[name].stats = stats
        for gone in (*taken.lost, *taken.left):
            self._instances[gone.instance].state = InstanceState.GONE
        given_up, self._lost = self._lost, []
        return replace(taken, lost=(*given_up, *taken.lost))

    def forget(self, keys: Iterable[SampleKey]) -> None:
        """Keep no note of delivered samples: who asks without an end would note them all."""
        for key in keys:
            self._asked.pop(key, None)
            self._delivered.pop(key, None)
            self._cut_keys.discard(key)

    def updates(self) -> list[str]:
        """What a person should know of restarts since the last call, one line each."""
        updates, self._updates = self._updates, []
        return updates

    def stop(self) -> None:
        """End the polling."""
        self._handle.stop.remote()

    def _send(self, order: str, *arguments: Any, ref: Any = None) -> Any:
        """Send one wish, or take `ref` for it, and return its answer; None when a new scheduler learnt it by notes."""
        try:
            self._require_alive()
            ref = getattr(self._handle, order).remote(*arguments) if ref is None else ref
            return self._get(ref, order, self._answers_within_s)
        except (ActorDied, WaitTimeout) as error:
            if isinstance(error, WaitTimeout) and error.waited_for != SCHEDULER:
                # the scheduler itself waited in vain for somebody
                raise
            self._restart(str(error))
            return None

    def _require_alive(self) -> None:
        """Raise what ended the polling, if it ended: its thread may die and the actor live on."""
        if ray.wait([self._sentinel], timeout=0)[0]:
            self._get(self._sentinel, "poll", 0.0)

    def _restart(self, reason: str) -> None:
        """Put a new scheduler into office that knows what the dead one knew, or can find it out."""
        while True:
            run_metrics.add("lost_actors", pool="scheduler")
            if not self._budget.spend():
                raise SchedulerLost(
                    f"{reason}; all {self._budget.most} restarts within an hour are used up "
                    "(cluster.max_scheduler_restarts)"
                )
            self._settings = replace(self._settings, term=self._settings.term + 1)
            self._planning_before_s, self._planning_s = self.planning_s, 0.0
            self._attempts = self._attempts_before = AttemptCounts()
            self._ahead = None
            # It may be alive and out of reach only: two schedulers must not give out one sample.
            ray.kill(self._handle)
            held = self._ask_what_is_held()
            self._handle = self._make(self._settings)
            try:
                self._rebuild(held)
            except ActorDied as error:
                reason = str(error)
                continue
            run_metrics.add("replaced_actors", pool="scheduler")
            self._updates.append(self._describe(reason, held))
            return

    def _ask_what_is_held(self) -> dict[str, HeldSamples]:
        """Ask every instance; one that is dead or answers not in time is ended and reported as lost.

        Raises what an instance's decode loop has failed with.
        """
        timeout_s = self._settings.heartbeat_timeout_s
        refs = {
            name: row.handle.hold.remote(self._settings.term, timeout_s)
            for name, row in self._instances.serving.items()
        }
        deadline_s = awake_s() + timeout_s + _GRACE_S
        held: dict[str, HeldSamples] = {}
        for name, ref in refs.items():
            try:
                held[name] = get(
                    ref,
                    waiter="the loop",
                    waited_for=name,
                    order="say what it holds",
                    timeout_s=max(0.0, deadline_s - awake_s()),
                )
            except (InstanceLost, WaitTimeout) as error:
                self._instances[name].state = InstanceState.GONE
                ray.kill(self._instances[name].handle)
                self._lost.append(LostInstance(instance=name, reason=str(error), num_requeued=0))
        return held

    def _rebuild(self, held: Mapping[str, HeldSamples]) -> None:
        rejoined = tuple(
            Rejoined(handle=row.handle, num_slots=row.num_slots, held=held[name])
            for name, row in self._instances.serving.items()
        )
        requests, delivered = tuple(self._asked.values()), tuple(self._delivered.values())
        ref = self._handle.rebuild.remote(requests, delivered, rejoined)
        self._get(ref, "rebuild its state", self._start_timeout_s)
        self._sentinel = self._handle.run.remote()
        self._handle.expect.remote(*self._expected)
        if self._is_cut and len(self._delivered) < len(self._asked):
            # answered before anything else is asked for
            self._get(self._handle.cut.remote(None), "cut", self._start_timeout_s)
        elif self._cut_keys:
            self._get(self._handle.cut.remote(frozenset(self._cut_keys)), "cut", self._start_timeout_s)
        for name, row in self._instances.serving.items():
            if row.state is InstanceState.LEAVING:
                self._handle.leave.remote(name, row.leaves_because)

    def _describe(self, reason: str, held: Mapping[str, HeldSamples]) -> str:
        kept = {key for one in held.values() for key in one.open_epochs}
        kept |= {completion.key for one in held.values() for completion in one.completions}
        is_open = self._asked.keys() - self._delivered.keys()
        return (
            f"{reason}; {scheduler_name(self._settings.term)} takes its place: of {len(is_open)} open "
            f"samples {len(is_open & kept)} are with {len(held)} instances, "
            f"{len(is_open - kept)} were queued again"
        )

    def _get(self, ref: Any, order: str, timeout_s: float) -> Any:
        return get(ref, waiter="the loop", waited_for=SCHEDULER, order=order, timeout_s=timeout_s)


def scheduler_name(term: int) -> str:
    """The actor's name in one term: Ray frees a name some time after its actor's death."""
    return f"scheduler-r{term}" if term else "scheduler"
