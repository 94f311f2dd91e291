"""The run's own schedule (`policies.staleness`) over simulated pools, phase by phase.

What a phase asks for, what an update learns from and whether it may begin is the schedule's to say; here are the
seconds that both take. A phase that ends with its update is cut wherever its responses are; they are asked for again,
and their caches computed anew, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.records import (
    FinishReason,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    WeightSpan,
)
from ..reallocation.pool_records import ReallocationPolicy
from ..scheduling.attempts import AttemptCounts
from ..staleness.recorded import FILL, PhasePlan
from ..staleness.rollout_schedule import Schedule
from .attempting_pool import AttemptingPool, LookAhead
from .simulation_records import (
    Binding,
    PoolSetup,
    Samples,
    SimulationResult,
    completion_of,
    joined,
    unread_tokens,
)


class Batches:
    """The samples of a run's batches, which come again and again, as a cursor would give them out."""

    def __init__(self, batches: Sequence[Samples], update_s: Sequence[float], *, group_samples: int) -> None:
        """`update_s`: of each batch's update where nothing else is busy, spread over its samples by tokens.

        Those of a group, `group_samples`, stand behind one another.
        """
        self._all = joined(batches)
        self._group = self._all.groups
        tokens = [batch.context_tokens / batch.context_tokens.sum() for batch in batches]
        self._update_s = np.concatenate([s * share for s, share in zip(update_s, tokens, strict=True)])
        self._sizes, self._group_samples = [len(batch) for batch in batches], group_samples
        self._num_batches = self._num_given = 0
        self.limit = int(self._all.response_tokens.max())

    def next_batch(self) -> list[SampleRequest]:
        """The samples of a further batch."""
        self._num_batches += 1
        return self._next(self._sizes[(self._num_batches - 1) % len(self._sizes)])

    def next_groups(self, count: int) -> list[SampleRequest]:
        """Those of so many further groups."""
        return self._next(count * self._group_samples)

    def peek(self) -> list[SampleRequest]:
        """What `next_batch` will give."""
        return copy(self).next_batch()

    def of_turns(self, turns: Sequence[SampleRequest]) -> Samples:
        """What instances decode of these turns: what went before belongs to the prompt."""
        index, done, limits = (
            np.array(
                [(turn.key.sample_index, _num_done(turn), turn.sampling.max_new_tokens) for turn in turns],
                int,
            )
            .reshape(-1, 3)
            .T
        )
        place = index % len(self._all)
        # no group of an earlier pass is one with this pass's; what goes on is like no other
        group = self._group[place] + (index // len(self._all)) * len(self._all)
        return Samples(
            response_tokens=np.minimum(self._all.response_tokens[place], limits) - done,
            prompt_tokens=self._all.prompt_tokens[place] + done,
            speed=self._all.speed[place],
            group=np.where((done > 0) | (self._group[place] < 0), -1, group),
        )

    def is_end(self, turn: SampleRequest, num_tokens: int) -> bool:
        """Whether a response of so many tokens is the whole one."""
        return num_tokens >= self._all.response_tokens[turn.key.sample_index % len(self._all)]

    def update_s(self, learned: Sequence[Rollout]) -> float:
        """Seconds of an update."""
        index = np.array([rollout.completion.key.sample_index for rollout in learned])
        return float(self._update_s[index % len(self._all)].sum())

    def _next(self, count: int) -> list[SampleRequest]:
        first, self._num_given = self._num_given, self._num_given + count
        sampling, prompts = SamplingParams(max_new_tokens=self.limit), self._all.prompt_tokens
        return [
            SampleRequest(
                key=SampleKey(run_seed=0, sample_index=index),
                prompt=Prompt(prompt_id=index, token_ids=unread_tokens(int(prompts[index % len(prompts)]))),
                sampling=sampling,
                group_id=index // self._group_samples,
            )
            for index in range(first, self._num_given)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPhase:
    """A phase and the update of its number, which begins within it or when it ends."""

    result: SimulationResult
    learned: Sequence[Rollout]
    attempts: AttemptCounts

    @property
    def seconds(self) -> float:
        """Until both are over."""
        return max(self.result.finish_s, self.result.learner_end_s)


def simulate_phases(
    schedule: Schedule,
    batches: Batches,
    *,
    setup: Callable[[Samples], PoolSetup],
    policy: Callable[[], ReallocationPolicy | None],
    binding: Binding,
    progress: Callable[[int], Callable[[int], None] | None] = lambda number: None,
    look_ahead: LookAhead | None = None,
) -> Iterator[SimulatedPhase]:
    """Play a schedule's phases from the first on, as many as are asked for.

    Args:
        schedule: of a new run over `batches`.
        batches: their samples.
        setup: the pool for the samples of a phase.
        policy: makes what moves samples, which starts afresh with every phase.
        binding: of samples to instances.
        progress: of a phase, counted from 1: told the number of its finished samples.
        look_ahead: how a phase in turns begins the batch of the next; None: it does not.
    """
    if schedule.needs_filling(0):
        # what a phase brings depends on counts of tokens alone: no pool has to play the one that fills the pipeline
        filling = schedule.begin(FILL)
        for turn, num_tokens in zip(filling, batches.of_turns(filling).response_tokens, strict=True):
            _take(schedule, batches, turn, FILL, int(num_tokens), is_cut=False)
    drafts: dict[int, int] = {}
    for number in range(schedule.num_iterations):
        turns = schedule.begin(number)
        samples = batches.of_turns(turns)
        report = progress(number + 1)
        phase = _Phase(
            schedule,
            batches,
            number,
            turns,
            samples=samples,
            setup=setup(samples),
            policy=policy(),
            binding=binding,
            progress=report,
            look_ahead=look_ahead,
            following=None if look_ahead is None else batches.of_turns(schedule.ahead(number)),
            drafts=drafts,
        )
        result = phase.run()
        drafts = {} if look_ahead is None else phase.next_drafts()
        yield SimulatedPhase(result=result, learned=phase.learned, attempts=phase.counts)


class _Phase(AttemptingPool):
    """The events of one phase."""

    def __init__(
        self, schedule: Schedule, batches: Batches, number: int, turns: Sequence[SampleRequest], **pool: Any
    ) -> None:
        super().__init__(number=number, **pool)
        self._schedule, self._batches, self._number = schedule, batches, number
        self._open = dict(enumerate(turns))
        "by the pool's own number of the sample"
        self._is_learned = False
        self.learned: list[Rollout] = []

    def run(self) -> SimulationResult:
        """See `SimulatedPool.run`; then what is open goes back to the schedule as far as it has got."""
        result = super().run()
        so_far = self.tokens_so_far()
        for sample in list(self._open):
            self._end_turn(sample, so_far.get(sample, 0), is_cut=sample not in self._ended)
        return result

    def _begin_run(self) -> None:
        self._train()
        super()._begin_run()

    def _is_over(self) -> bool:
        return self._is_learned if self._schedule.ends_with_update else super()._is_over()

    def _delivered(self, sample: int) -> None:
        super()._delivered(sample)
        self._end_turn(sample, 0, is_cut=False)
        self._train()

    def _end_turn(self, sample: int, num_tokens: int, *, is_cut: bool) -> None:
        whole = int(self._samples.response_tokens[sample])
        num_tokens = min(num_tokens, whole - 1) if is_cut else whole
        _take(self._schedule, self._batches, self._open.pop(sample), self._number, num_tokens, is_cut=is_cut)

    def _train(self) -> None:
        if not self.learned and self._schedule.has(self._number):
            self.learned = self._schedule.take(self._number)
            self._learn(self._batches.update_s(self.learned))

    def _learned(self, expected: int) -> None:
        super()._learned(expected)
        self._is_learned |= expected == self._learning


def _take(
    schedule: Schedule, batches: Batches, turn: SampleRequest, number: int, num_tokens: int, *, is_cut: bool
) -> None:
    """Give the schedule what a phase has added to a sample; whole responses are scored at once."""
    done, before = _num_done(turn), turn.history.weight_spans if turn.history is not None else ()
    reason = FinishReason.STOP if batches.is_end(turn, done + num_tokens) else FinishReason.LENGTH
    version = WeightSpan(weight_version=PhasePlan.weight_version(number), first_position=done)
    completion = replace(
        completion_of(turn, done + num_tokens, ""),
        finish_reason=FinishReason.CUT if is_cut else reason,
        weight_spans=(*before, *([version] if num_tokens else [])),
    )
    if (ended := schedule.whole(completion)) is not None:
        request, response = ended
        rollout = Rollout(
            prompt=request.prompt, completion=response, response_text="", reward=Reward(value=0.0)
        )
        schedule.ended(response.key, rollout)


def _num_done(turn: SampleRequest) -> int:
    return len(turn.history.token_ids) if turn.history is not None else 0
