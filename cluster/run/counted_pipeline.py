"""The reproducible schedule: which samples decode while which update runs follows from counts of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from rlhfspec.cluster.run.pipeline import OpenSample, Pipeline
from rlhfspec.core.errors import WeightsError
from rlhfspec.core.records import Rollout, SampleKey, SampleRequest
from rlhfspec.policies.pipelining.phase_plan import PhasePlan


class CountedPipeline(Pipeline):
    """By a `PhasePlan`: a batch is sampled in the phases before its update, and each ends at its counts."""

    def __init__(self, plan: PhasePlan, next_requests: Callable[[], Sequence[SampleRequest]]) -> None:
        """`next_requests`: a further batch's, batch by batch from the first that has not begun."""
        super().__init__(num_iterations=plan.num_iterations, max_staleness=plan.max_staleness)
        self.plan = plan
        self._next_requests = next_requests

    def begin(self, phase: int) -> list[SampleRequest]:
        """See `Pipeline.begin`."""
        for batch in self.plan.batches(phase):
            if batch not in self._ready:
                self._ready[batch] = {}
                self._open |= {r.key: OpenSample(batch=batch, request=r) for r in self._next_requests()}
        # a run that was resumed with fewer iterations leaves later batches where they are
        asked = [one for one in self._open.values() if one.batch in self.plan.batches(phase)]
        return [self._turn(one, most=self.plan.limit(one.batch, phase)) for one in asked]

    def has(self, batch: int) -> bool:
        """See `Pipeline.has`."""
        return batch in self._ready and not self._missing(batch)

    def needs_filling(self, batch: int) -> bool:
        """See `Pipeline.needs_filling`."""
        return batch not in self._ready or any(one.batch == batch for one in self._open.values())

    def take(self, batch: int) -> list[Rollout]:
        """See `Pipeline.take`."""
        if missing := self._missing(batch):
            raise WeightsError(
                f"batch {batch} is to be learned from and {len(missing)} of its samples are not whole or not scored, "
                f"sample {missing[0].sample_index} among them; this is a fault of the project, please report it"
            )
        return self._fresh(batch, self._ready.pop(batch).values())

    def _missing(self, batch: int) -> list[SampleKey]:
        waiting = chain(self._open.items(), self._unscored.items())
        return [key for key, one in waiting if one.batch == batch]
