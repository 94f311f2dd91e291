"""The recorded schedule: which samples decode while which update runs follows from counts of tokens, not from a clock.

Phase p is what instances do while update p runs, and all of it is sampled from weight version p. A batch has `lag`
phases before its own update, and in each of them its samples get an equal share of the longest response:

    phase       0        1        2        3          lag 2: in phase p batch p + 1 gets its second half,
    batch 1    done                                          and batch p + 2 its first
    batch 2    first    second
    batch 3             first    second
    update      0        1        2        3

So a response's tokens come of at most `lag` versions, switched at multiples of the share, the oldest `lag` versions
behind its update, and no phase is longer than a share: whoever is longer goes on beside the next batch's short ones.
Before the first update comes a phase -1, sampled from version 0, that brings all batches as far as phase 0 expects.

Dynamic sampling replaces groups of the batch that is due next, in the phase before its update: their further prompts
are sampled whole there, so that phase may be longer. Other batches draw no prompt then, so who ends first says nothing.

Sources: partial rollouts as in Kimi k1.5 (arXiv 2501.12599, section 2.6.2) and APRIL (arXiv 2509.18521); one step off
as in verl's recipe of that name. What is ours is that shares of tokens take the place of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ...core.records import Rollout, SampleKey, SampleRequest, Unscored
from .in_turns import UsefulGroups
from .rollout_schedule import Schedule, in_order

FILL = -1
"The phase before the first update."


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Pure arithmetic. Iterations, their batches and updates count from 0."""

    max_staleness: int
    "weight versions between a token and the update that learns from it, at most; at least 1"
    weight_load: Literal["drain", "reprefill"]
    "drain: a response is of one version"
    max_new_tokens: int
    num_iterations: int

    @property
    def lag(self) -> int:
        """Phases in which a batch is sampled; whole responses need one only, and more would be older for nothing."""
        return 1 if self.weight_load == "drain" else self.max_staleness

    @property
    def share(self) -> int:
        """Tokens that a phase adds to a response at most."""
        return -(-self.max_new_tokens // self.lag)

    def batches(self, phase: int) -> range:
        """Those that are sampled in a phase, the one that is due next first."""
        return range(phase + 1, min(phase + self.lag, self.num_iterations - 1) + 1)

    def limit(self, batch: int, phase: int) -> int:
        """Tokens that a batch's responses may have at the end of a phase in which it is sampled."""
        return min(self.max_new_tokens, self.share * (self.lag - (batch - phase) + 1))

    @staticmethod
    def weight_version(phase: int) -> int:
        """What a phase is sampled from, where the run's first weights are version 0."""
        return max(phase, 0)


class Recorded(Schedule):
    """By a `PhasePlan`: a batch is sampled in the phases before its update, and each ends at its counts."""

    def __init__(
        self,
        plan: PhasePlan,
        next_requests: Callable[[], Sequence[SampleRequest]],
        *,
        useful_groups: Callable[..., UsefulGroups] | None = None,
    ) -> None:
        """`next_requests`: a further batch's, batch by batch from the first that has not begun.

        `useful_groups`: of samples of a batch, where useless groups are replaced.
        """
        super().__init__(num_iterations=plan.num_iterations, max_staleness=plan.max_staleness)
        self.plan = plan
        self._next_requests, self._useful_groups = next_requests, useful_groups
        self.scores_in_phase = useful_groups is not None
        self._due: tuple[int, UsefulGroups] | None = None
        "the batch whose useless groups are replaced, and its groups"
        self._metrics: dict[str, float] = {}

    @property
    def num_phases(self) -> int:
        """The last update has nothing beside it."""
        return self.num_iterations - 1

    def begin(self, phase: int) -> list[SampleRequest]:
        """See `Schedule.begin`."""
        for batch in self.plan.batches(phase):
            if batch not in self._ready:
                self._begin_batch(batch, self._next_requests())
        self._begin_due(phase + 1)
        # a run that was resumed with fewer iterations leaves later batches where they are
        asked = [one for one in self._open.values() if one.batch in self.plan.batches(phase)]
        return [self._turn(one, most=self.plan.limit(one.batch, phase)) for one in asked]

    def _begin_due(self, batch: int) -> None:
        """Replace the groups of a batch that are known to be useless by now."""
        self._due = None
        if self._useful_groups is None or batch not in self.plan.batches(batch - 1):
            return
        known = in_order(self._ready[batch].values())
        opened = [one.request for one in self._open.values() if one.batch == batch]
        groups = self._useful_groups([*(one.completion for one in known), *opened])
        for rollout in known:
            self._begin_batch(batch, groups.scored(rollout))
        self._due = (batch, groups)

    def ended(self, key: SampleKey, outcome: Rollout | Unscored) -> list[SampleRequest]:
        """See `Schedule.ended`."""
        sample = self._sample(key)
        super().ended(key, outcome)
        if self._due is None or self._due[0] != sample.batch:
            return []
        further = self._due[1].after(sample.request.group_id, outcome)
        return self._whole_turns(self._begin_batch(sample.batch, further).values())

    def has(self, batch: int) -> bool:
        """See `Schedule.has`."""
        return batch in self._ready and not self._missing(batch)

    def needs_filling(self, batch: int) -> bool:
        """See `Schedule.needs_filling`."""
        return batch not in self._ready or any(one.batch == batch for one in self._open.values())

    def take(self, batch: int) -> list[Rollout]:
        """See `Schedule.take`. Raises NumericsError where no group teaches."""
        self._require_none(self._missing(batch), batch)
        rollouts = self._fresh(batch, self._ready.pop(batch).values())
        if self._useful_groups is None:
            return rollouts
        # by what a state keeps of the batch, so that a resumed run chooses alike
        groups = self._useful_groups([one.completion for one in rollouts], max_extra=0)
        for rollout in rollouts:
            groups.scored(rollout)
        self._metrics = groups.metrics()
        return self._chosen(rollouts, groups.batch)

    def metrics(self) -> dict[str, float]:
        """See `Schedule.metrics`; of dynamic sampling too."""
        return super().metrics() | self._metrics

    def _missing(self, batch: int) -> list[SampleKey]:
        waiting = chain(self._open.items(), self._unscored.items())
        return [key for key, one in waiting if one.batch == batch]
