"""Samples between instances and trainer where generation runs ahead of learning (`policies.pipelining.phase_plan`).

Whatever order samples end in, a batch is given out in the order of their index, when its last one is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.rollout_buffer import in_order, require_fresh
from core.errors import RewardError, WeightsError
from core.records import Completion, FinishReason, Rollout, SampleKey, SampleRequest
from policies.pipelining.phase_plan import PhasePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSample:
    """A sample whose response is not whole."""

    batch: int
    request: SampleRequest
    "as the cursor made it"
    so_far: Completion | None = None
    "None: nothing was sampled yet"
    num_turns: int = 0
    "that it was asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """All that is between instances and trainer at the end of a phase; what a state of the run keeps of it."""

    open_samples: dict[SampleKey, OpenSample] = field(default_factory=dict)
    ready: dict[int, dict[SampleKey, Rollout]] = field(default_factory=dict)
    "scored responses by batch"


class Pipeline:
    """Of one run. A batch is taken for its update, and the phase of that number begins beside it."""

    def __init__(self, plan: PhasePlan, next_requests: Callable[[], Sequence[SampleRequest]]) -> None:
        """`next_requests`: a further batch's, batch by batch from the first that has not begun."""
        self.plan = plan
        self._next_requests = next_requests
        self._open: dict[SampleKey, OpenSample] = {}
        self._ready: dict[int, dict[SampleKey, Rollout]] = {}

    @property
    def num_open(self) -> int:
        """Samples that are cut, and go on in the next phase."""
        return len(self._open)

    def has(self, batch: int) -> bool:
        """Whether a batch is whole."""
        return batch in self._ready and all(one.batch != batch for one in self._open.values())

    def begin(self, phase: int) -> list[SampleRequest]:
        """Begin a phase: what to ask the instances for, none where the run needs no more."""
        for batch in self.plan.batches(phase):
            if batch not in self._ready:
                self._ready[batch] = {}
                self._open |= {r.key: OpenSample(batch=batch, request=r) for r in self._next_requests()}
        # a run that was resumed with fewer iterations leaves later batches where they are
        return [
            self._turn(one, phase) for one in self._open.values() if one.batch in self.plan.batches(phase)
        ]

    def whole(self, completion: Completion) -> tuple[SampleRequest, Completion] | None:
        """Take what a phase has added to a sample; its request and response where that is whole, else it waits."""
        one = self._open[completion.key.sample]
        done = replace(completion, key=one.request.key, sampled=None)
        is_cut = completion.finish_reason is FinishReason.LENGTH
        if is_cut and completion.num_tokens < one.request.sampling.max_new_tokens:
            self._open[done.key] = replace(one, so_far=done, num_turns=one.num_turns + 1)
            return None
        return one.request, done

    def ended(self, key: SampleKey, rollout: Rollout | None) -> None:
        """Take a sample's scored response; None: it is left out."""
        batch = self._open.pop(key).batch
        if rollout is not None:
            self._ready[batch][key] = rollout

    def batch(self, batch: int) -> list[Rollout]:
        """The scored responses of a batch so far, in the order of the sample index."""
        return in_order(self._ready[batch].values())

    def take(self, batch: int) -> list[Rollout]:
        """Take a batch for its update, in the order of the sample index.

        Raises WeightsError: a token is older than the run allows, or a sample is missing; RewardError: no reward is
        there.
        """
        missing = [key.sample_index for key, one in self._open.items() if one.batch == batch]
        if missing:
            raise WeightsError(
                f"batch {batch} is to be learned from and {len(missing)} of its samples are not whole, sample "
                f"{missing[0]} among them; this is a fault of the project, please report it"
            )
        rollouts = self.batch(batch)
        if not rollouts:
            raise RewardError(
                f"none of the samples of iteration {batch + 1} could be scored, and nothing is left to learn from; the "
                "notes above say why they were skipped"
            )
        del self._ready[batch]
        for rollout in rollouts:
            require_fresh(rollout, weight_version=batch, max_staleness=self.plan.max_staleness)
        return rollouts

    def in_flight(self) -> InFlight:
        """What is here between two phases; it stays as it is while the pipeline goes on."""
        ready = {batch: dict(rollouts) for batch, rollouts in self._ready.items()}
        return InFlight(open_samples=dict(self._open), ready=ready)

    def restore(self, in_flight: InFlight) -> None:
        """Go on where `in_flight` was taken; the cursor is restored by whoever has it."""
        self._open = dict(in_flight.open_samples)
        self._ready = {batch: dict(rollouts) for batch, rollouts in in_flight.ready.items()}

    def _turn(self, one: OpenSample, phase: int) -> SampleRequest:
        request, before = one.request, one.so_far
        most, goes_back = self.plan.limit(one.batch, phase), self.plan.weight_load == "keep_kv"
        keeps = goes_back and most < request.sampling.max_new_tokens
        return replace(
            request,
            # what is asked for twice has two keys; the noise is the sample's
            key=replace(request.key, turn=one.num_turns),
            sampling=replace(request.sampling, max_new_tokens=most),
            # whose caches are gone may as well go on elsewhere
            history=None
            if before is None
            else replace(before.as_history(), instance=before.instance if goes_back else ""),
            keeps_caches=keeps,
            caches_outlive_weights=keeps,
            is_cut_at_limit=most < request.sampling.max_new_tokens,
        )
