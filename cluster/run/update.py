"""The update of a batch, beside a phase: it begins when the batch is whole and scored, and may end the phase."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray

from ...actors.remote.watch import LOOK_S
from ...core.errors import NumericsError
from ...core.records import Rollout, UpdateReport
from ...core.weight_records import kind_of
from ...policies.staleness.rollout_schedule import Schedule, in_order
from ..system.system import System
from .run_log import RunLog


class Update:
    """Of one iteration."""

    def __init__(self, system: System, schedule: Schedule, iteration: int, log: RunLog) -> None:
        self._system, self._schedule, self._iteration, self._log = system, schedule, iteration, log
        self._order: Mapping[str, Any] | None = None
        self._report: UpdateReport | None = None
        self.learned: list[Rollout] = []
        "once it has begun"
        self.sampled: list[Rollout] = []
        "these, and what was scored for the batch and is not learned from"
        self.batch: Any = None
        "what is learned from, in the object store"
        self.began_s = 0.0
        "by `time.perf_counter`, once it has"
        self.ended_s = 0.0
        "when the trainers had answered, once they have"

    def look(self) -> None:
        """Begin where the batch is whole; take the report where it is there, and end the phase.

        Raises as `TrainerPool.update`: a dead or frozen trainer is told here.
        """
        if self._report is not None:
            return
        if self._order is None:
            if self._schedule.has(self._iteration):
                self._begin()
        elif self._system.trainers.is_over(self._order):
            self._end(samples_are_open=True)
            if self._schedule.ends_with_update:
                self._system.scheduler.cut()
        elif time.monotonic() - self._looked_s > LOOK_S:
            self._looked_s = time.monotonic()
            self._alive.look()

    def awaits_rewards(self) -> bool:
        """Whether it cannot begin before rewards are there that are being computed."""
        has_begun = self._order is not None or self._schedule.has(self._iteration)
        return not has_begun and self._schedule.num_unscored > 0

    def wait(self) -> UpdateReport:
        """Wait for the report. Raises as `TrainerPool.update`; WeightsError, RewardError: see `Schedule.take`."""
        if self._order is None:
            self._begin()
        if self._report is None:
            self._end(samples_are_open=False)
        assert self._report is not None
        return self._report

    def waits(self, began_s: float, generated_s: float, loaded_s: float) -> dict[str, float]:
        """Who waited for whom in an iteration from `began_s` on: its last completion, and the last load behind it."""
        # what the update's end cuts stops decoding there
        stopped_s = self.ended_s if self._schedule.ends_with_update else max(self.ended_s, generated_s)
        backpressure_s = max(0.0, self.ended_s - max(self.began_s, generated_s))
        return {
            "time/rollout_wait_s": self.began_s - began_s + stopped_s - self.ended_s,
            "time/backpressure_s": backpressure_s,
            "time/update_hidden_s": self.ended_s - self.began_s - backpressure_s,
            "time/pause_s": loaded_s - stopped_s,
        }

    def log_advantages(self) -> None:
        """Write the rollouts again: an update that fails must not take them with it, so they were written before."""
        assert self._report is not None
        keys = (rollout.completion.key for rollout in self.learned)
        of_key = dict(zip(keys, self._report.sample_advantages or (), strict=False))
        self._log.rollouts(
            self._iteration, self.sampled, [of_key.get(rollout.completion.key) for rollout in self.sampled]
        )

    def _begin(self) -> None:
        trainers = self._system.trainers
        try:
            self.learned = self._schedule.take(self._iteration)
        except NumericsError:
            # no group teaches: what was sampled is to be looked at
            self._log.rollouts(self._iteration, in_order(self._schedule.left_out))
            raise
        self.sampled = in_order([*self.learned, *self._schedule.left_out])
        self.batch = ray.put(self.learned)
        self._log.rollouts(self._iteration, self.sampled)
        target = self._system.target
        if not self._system.config.keeps_published:
            # who joins meanwhile gets the next version: the store holds one at a time
            target.drop_chunks(partial(trainers.begin_take, checksums=kind_of(target.manifest.checksum)))
        self._system.is_learning, self.began_s = True, time.perf_counter()
        self._order = trainers.begin_update(self.batch, recompute_old=self._system.recomputes_old)
        self._alive, self._looked_s = trainers.heartbeat("update"), time.monotonic()

    def _end(self, *, samples_are_open: bool) -> None:
        assert self._order is not None
        self._report = self._system.trainers.end_update(self._order, samples_are_open=samples_are_open)
        self.ended_s = time.perf_counter()
