"""A simulated pool that begins the next batch in slots that are free, and whose samples have drafts of the last one.

The scheduler and the law of the run place attempts (`policies.scheduling.attempts`); here they decode as samples do,
give way to any, go on beside the update where instances have GPUs of their own, and end at publication. In the next
rollout a sample verifies what its attempt left, a chain a step, up to the first token that differs, then decodes on.
Where that token stands is drawn: each is the first with one probability, of `agreement_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...core.records import FinishReason
from ..reallocation.pool_records import ReallocationPolicy
from ..scheduling.attempts import AttemptCounts
from ..scheduling.events import AttemptsArrived, SamplesArrived, Submit
from ..scheduling.look_ahead import CHAIN, LookAheadLaw
from .simulated_instance import SimulatedInstance
from .simulated_pool import Kind, SimulatedPool
from .simulation_records import Binding, PoolSetup, Samples, SimulationResult, completion_of, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAhead:
    """What a run that looks ahead is made of."""

    law: LookAheadLaw
    agreement_tokens: float
    "mean tokens before the first that new weights give another, one update on"
    row_s: np.ndarray
    "[slots] seconds of a verified row with 1, 2, .. samples"
    step_tokens: float
    "of a mean sample in a decode step without such a draft"
    beside_s: float | None
    "seconds for which instances go on when the update is done; None: they rest from its beginning on"
    seed: int


class AttemptingPool(SimulatedPool):
    """As `SimulatedPool` where `look_ahead` is None."""

    def __init__(
        self,
        samples: Samples,
        setup: PoolSetup,
        policy: ReallocationPolicy | None,
        binding: Binding,
        progress: Callable[[int], None] | None,
        look_ahead: LookAhead | None,
        following: Samples | None,
        drafts: Mapping[int, int],
        number: int,
    ) -> None:
        """`following`: the next batch; `drafts`: tokens of those that samples have; `number`: of the rollout."""
        own, self._num_own = samples, len(samples)
        samples = own if following is None else joined([own, following])
        super().__init__(samples, setup, policy, binding, progress, look_ahead and look_ahead.law)
        self._ahead, self._following = look_ahead, tuple(self._requests[self._num_own :])
        self._proved: dict[int, tuple[int, int]] = {}
        "of samples with a draft: its tokens, and those before the first that differs"
        self._proving: set[int] = set()
        "those that have not got so far"
        self._finish_s = 0.0
        self._is_published = False
        if look_ahead is not None:
            pace_s = CHAIN * look_ahead.row_s / look_ahead.step_tokens
            self._line = replace(self._line, chain_s=[0.0, *pace_s.tolist()])
            self._known_paces = {1.0: self._line}
            self._begin_with_drafts(look_ahead, drafts, number)

    def _begin_with_drafts(self, ahead: LookAhead, drafts: Mapping[int, int], number: int) -> None:
        random = np.random.default_rng([ahead.seed, 2, number])
        agree = random.geometric(1.0 / ahead.agreement_tokens, self._num_own) - 1
        self._until, self._speed, self._to_go = (
            part.copy() for part in (self._until, self._speed, self._to_go)
        )
        for sample, tokens in drafts.items():
            whole = int(self._samples.response_tokens[sample])
            proved = min(tokens, int(agree[sample]), whole)
            self._proved[sample] = tokens, proved
            # a step emits the target's own token behind what it accepts
            self._until[sample] = min(proved + 1, whole)
            num_steps = -(-self._until[sample] // (CHAIN + 1))
            self._to_go[sample] = num_steps * ahead.step_tokens
            self._speed[sample] = self._until[sample] / self._to_go[sample]
            self._proving.add(sample)

    def run(self) -> SimulationResult:
        """See `SimulatedPool.run`."""
        result = super().run()
        if self._ahead is None:
            return result
        tokens = int(self._samples.response_tokens[: self._num_own].sum())
        return replace(result, finish_s=self._finish_s, num_tokens=tokens)

    def next_drafts(self) -> dict[int, int]:
        """Tokens of the drafts that the next batch's samples are given, by their numbers there; the run is over."""
        self._scheduler.handle(SamplesArrived(requests=self._following))
        given = ((one.request.key.sample_index, one.request.draft) for one in self._scheduler.open_samples())
        return {number - self._num_own: len(draft) for number, draft in given if draft is not None}

    @property
    def counts(self) -> AttemptCounts:
        """Attempts made in this run, and drafts verified in it."""
        num_tokens, num_proved = map(sum, zip((0, 0), *self._proved.values(), strict=True))
        return replace(
            self._scheduler.attempt_counts,
            num_drafts=len(self._proved),
            num_draft_tokens=num_tokens,
            num_proved_tokens=num_proved,
        )

    def _begin_run(self) -> None:
        self._ask(range(self._num_own))
        if self._ahead is not None:
            self._send(AttemptsArrived(requests=self._following))

    def _is_over(self) -> bool:
        return self._num_done == self._num_own if self._ahead is None else self._is_published

    def _delivered(self, sample: int) -> None:
        super()._delivered(sample)
        if self._ahead is None:
            return
        if sample in self._proved:
            self._ahead.law.observe(*self._proved[sample])
        if self._num_done == self._num_own:
            self._finish_s = self._now_s
            if self._ahead.beside_s is None:
                self._publish()

    def _poll(self) -> None:
        # attempts alone are not looked after
        if self._num_done < self._num_own:
            super()._poll()

    def _learned(self, expected: int) -> None:
        super()._learned(expected)
        if self._ahead is not None and self._ahead.beside_s is not None and expected == self._learning:
            self._at(self._now_s + self._ahead.beside_s, Kind.POLL, self._publish)

    def _publish(self) -> None:
        """New weights end all attempts."""
        self._is_published = True
        for instance in self._instances.values():
            while instance.attempts:
                self._end_attempt(instance, instance.attempts[-1])

    # attempts and their drafts on an instance

    def _submit(self, order: Submit) -> None:
        instance, attempts = self._instances[order.instance], [r for r in order.requests if r.is_attempt]
        if not attempts:
            super()._submit(order)
            return
        instance.advance(self._now_s)
        for request in attempts:
            sample = request.key.sample_index
            self._requests[sample] = request
            if len(instance.running) + instance.num_reserved >= self._setup.num_slots:
                self._tell(instance, sample, 0)
                continue
            prompt_s = self._prompt_s(sample)
            if prompt_s > 0 and not self._shares_prompt(sample, instance):
                instance.block(prompt_s)
            instance.attempts.append(sample)
            context = float(self._samples.prompt_tokens[sample])
            self._add(instance, sample, float(self._to_go[sample]), context)
        self._reschedule(instance)

    def _has_slot(self, instance: SimulatedInstance) -> bool:
        if instance.attempts and not super()._has_slot(instance):
            self._end_attempt(instance, instance.attempts[-1])
        return super()._has_slot(instance)

    def _add(self, instance: SimulatedInstance, sample: int, to_go: float, context_tokens: float) -> None:
        super()._add(instance, sample, to_go, context_tokens)
        if sample in self._proving:
            instance.proving.add(sample)

    def _end(self, instance: SimulatedInstance, sample: int, num_changes: int) -> None:
        if num_changes != instance.num_changes or not (
            sample in instance.attempts or sample in self._proving
        ):
            super()._end(instance, sample, num_changes)
        elif sample in instance.attempts:
            self._end_attempt(instance, sample)
            self._reschedule(instance)
            self._start_next(instance)
        else:
            self._proving.remove(sample)
            whole = int(self._samples.response_tokens[sample])
            left = whole - int(self._until[sample])
            if not left:
                super()._end(instance, sample, num_changes)
                return
            # behind what was verified it decodes as any other
            instance.advance(self._now_s)
            _, context = instance.remove(sample)
            self._until[sample], self._speed[sample] = whole, self._samples.speed[sample]
            to_go = left / float(self._speed[sample]) + self._setup.last_step_tokens
            self._add(instance, sample, to_go, context)
            self._reschedule(instance)

    def _end_attempt(self, instance: SimulatedInstance, sample: int) -> None:
        """Let an attempt go, and tell how far it got."""
        instance.advance(self._now_s)
        num_tokens = self._tokens_so_far(instance)[self._requests[sample].key]
        instance.attempts.remove(sample)
        instance.remove(sample)
        self._tell(instance, sample, num_tokens)

    def _tell(self, instance: SimulatedInstance, sample: int, num_tokens: int) -> None:
        completion = completion_of(self._requests[sample], num_tokens, instance.name)
        is_whole = num_tokens == self._samples.response_tokens[sample]
        reason = FinishReason.STOP if is_whole else FinishReason.CUT
        completions = (replace(completion, finish_reason=reason),)
        if self._is_published:
            # an instance tells before it says that it has the new weights
            self._receive(instance.name, {"completions": completions})
        else:
            self._say(instance.name, completions=completions)
