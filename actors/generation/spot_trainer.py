"""The spot trainer of one instance: trains the draft head while no sample is there (TLT, arXiv 2511.16665, section 4).

Features arrive from the decode thread, are kept in a bounded buffer, and are learned from on a thread of its own. What
was learned since the head was last published is handed over at the refit point of the loop (`cluster.head_step`);
averaging, comparing and publishing are the loop's. No token depends on any of it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
from torch import Tensor

from actors.actor_messages import HeadComparison, HeadProgress
from actors.generation.spare_time import SpareTime
from engine.drafters.head.feature_sequence import FeatureSequence

HELD_OUT_EVERY = 8
"Of the sequences that arrive one in so many is never learned from: heads are compared on them."
HELD_OUT_SHARE = 0.125
"Of the buffer's bytes."
RATE_AFTER_FAILURE = 0.5
RATE_AFTER_SUCCESS = 1.5


class StepReport(Protocol):
    """What the trainer needs of `learning.heads.head_trainer.StepReport`."""

    @property
    def num_anchors(self) -> int:
        """Positions that were learned from."""
        ...

    @property
    def needs(self) -> tuple[float, ...]:
        """Of each sequence: the share of its positions on which the head fails."""
        ...


class HeadLearner(Protocol):
    """What the trainer needs of `learning.heads.head_trainer.HeadTrainer`."""

    learning_rate: float
    "of later steps"

    def step(
        self, sequences: Sequence[FeatureSequence], should_stop: Callable[[], bool] = ...
    ) -> StepReport | None:
        """Take a step; None: nothing has changed, it was stopped."""
        ...

    def evaluate(self, sequences: Sequence[FeatureSequence]) -> float:
        """Return the loss on them, nats a token."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Copies of the trained tensors."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from other weights."""
        ...


class HeadBuffer(Protocol):
    """What the trainer needs of `learning.heads.feature_buffer.FeatureBuffer`."""

    @property
    def num_anchors(self) -> int:
        """Positions that can be learned from."""
        ...

    def add(self, sequence: FeatureSequence) -> bool:
        """Keep a sequence."""
        ...

    def sample(self, rng: np.random.Generator, max_tokens: int) -> list[FeatureSequence]:
        """Draw some."""
        ...

    def learned(self, sequences: Sequence[FeatureSequence], needs: Sequence[float]) -> None:
        """Take what a step found."""
        ...

    def next_iteration(self) -> None:
        """Leave out what is older than the iteration that ends."""
        ...


class SpotTrainer:
    """Learns in spare time. `take` is the decode thread's; what loads or hands over weights pauses it first."""

    def __init__(
        self,
        learner: HeadLearner,
        buffer: HeadBuffer,
        head: Mapping[str, Tensor],
        *,
        name: str,
        max_bytes: int,
        max_tokens_per_step: int,
        max_passes: int,
        seed: int,
        read_target: Callable[[], None] = lambda: None,
        begin: Callable[[], None] = lambda: None,
        count: Callable[[float, int], None] = lambda seconds, tokens: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start its thread; nothing is learned before features arrive and it is allowed.

        Args:
            learner: holds the head and its optimizer.
            buffer: what is learned from, of at most `max_bytes`.
            head: the trained tensors as they were published.
            name: of the thread.
            max_bytes: of the buffer; what is held out takes `HELD_OUT_SHARE` of it beside.
            max_tokens_per_step: response tokens that a step learns from.
            max_passes: over what the buffer holds, until more arrives.
            seed: of what is drawn.
            read_target: lets the learner read the target's weights anew.
            begin: called first on the thread.
            count: told the seconds and tokens of every step, on the thread.
            clock: seconds.
        """
        self._learner, self._buffer, self._head = learner, buffer, dict(head)
        self._max_tokens, self._max_passes = max_tokens_per_step, max_passes
        self._full_rate = learner.learning_rate
        self._rate_scale = 1.0
        self._rng = np.random.default_rng([seed, 0x5E07])
        self._read_target, self._count, self._clock = read_target, count, clock
        self._inbox: SimpleQueue[FeatureSequence] = SimpleQueue()
        self._num_arrived = 0
        self._held_out: deque[FeatureSequence] = deque()
        self._held_out_bytes = 0
        self._most_held_out = int(max_bytes * HELD_OUT_SHARE)
        self._learned_since_arrival = 0
        self._num_steps = self._num_tokens = 0
        self._train_s = 0.0
        self.spare = SpareTime(self._learn, name=name, begin=begin)

    def take(self, sequence: FeatureSequence) -> None:
        """Take what a finished sample gives to learn from; returns at once."""
        self._inbox.put(sequence)
        self.spare.more()

    def target_changes(self) -> None:
        """The target is about to get other weights: stop reading it. Raises WaitTimeout."""
        self.spare.pause()

    def target_changed(self) -> None:
        """It has got them: another iteration begins."""
        self._sort_in()
        self._buffer.next_iteration()
        self._read_target()

    def progress(self) -> tuple[HeadProgress, dict[str, np.ndarray]]:
        """What was done since the last published head, and the tensors that came of it; none where nothing was learned.

        Raises WaitTimeout.
        """
        self.spare.pause()
        failure = self.spare.failure
        told = HeadProgress(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            train_s=self._train_s,
            held_out_tokens=sum(each.num_response_tokens for each in self._held_out),
            failure="" if failure is None else f"{type(failure).__name__}: {failure}",
        )
        if failure is not None or not self._num_tokens:
            return told, {}
        return told, {name: tensor.numpy() for name, tensor in self._learner.weights().items()}

    def compare(self, tensors: Mapping[str, Tensor]) -> HeadComparison:
        """Compare other weights with the published ones on what was held out. Raises WaitTimeout, ConfigError."""
        self.spare.pause()
        self._sort_in()
        held_out = list(self._held_out)
        losses = []
        for weights in (self._head, tensors):
            self._learner.load(weights)
            losses.append(self._learner.evaluate(held_out) if held_out else math.nan)
        return HeadComparison(
            present=losses[0],
            tried=losses[1],
            num_tokens=sum(each.num_response_tokens for each in held_out),
        )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a head that was published. Raises WaitTimeout, ConfigError: it is another one."""
        self.spare.pause()
        self._head = dict(tensors)
        self._rate_scale = min(1.0, self._rate_scale * RATE_AFTER_SUCCESS)
        self._begin_from_published()

    def give_up(self) -> None:
        """Go back to the published head, and learn more slowly from there. Raises WaitTimeout."""
        self.spare.pause()
        self._rate_scale *= RATE_AFTER_FAILURE
        self._begin_from_published()

    def _begin_from_published(self) -> None:
        self._learner.load(self._head)
        self._learner.learning_rate = self._full_rate * self._rate_scale
        self._num_steps = self._num_tokens = 0
        self._train_s = 0.0

    def _learn(self, should_stop: Callable[[], bool]) -> bool:
        """One step; see `SpareTime`."""
        self._sort_in()
        if self._learned_since_arrival >= self._max_passes * self._buffer.num_anchors:
            return False
        sequences = self._buffer.sample(self._rng, self._max_tokens)
        began_s = self._clock()
        report = self._learner.step(sequences, should_stop)
        seconds = self._clock() - began_s
        self._train_s += seconds
        tokens = 0 if report is None else report.num_anchors
        self._count(seconds, tokens)
        if report is None:
            # stopped, or nothing in these could be learned from
            return should_stop()
        self._buffer.learned(sequences, report.needs)
        self._num_steps += 1
        self._num_tokens += tokens
        self._learned_since_arrival += tokens
        return True

    def _sort_in(self) -> None:
        """Take what has arrived: most to be learned from, some to compare heads on."""
        while True:
            try:
                sequence = self._inbox.get_nowait()
            except Empty:
                return
            self._num_arrived += 1
            if self._num_arrived % HELD_OUT_EVERY:
                if self._buffer.add(sequence):
                    self._learned_since_arrival = 0
                continue
            self._held_out.append(sequence)
            self._held_out_bytes += sequence.num_bytes
            while self._held_out_bytes > self._most_held_out and len(self._held_out) > 1:
                self._held_out_bytes -= self._held_out.popleft().num_bytes
