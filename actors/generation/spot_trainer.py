"""The spot trainer of one instance: trains the draft head while no sample is there (TLT, arXiv 2511.16665, section 4).

The decode thread brings the features of finished samples into a bounded buffer; a thread of its own learns from them.
What was learned since the head was last published is handed over at the refit point of the loop
(`cluster.run.draft_step`); averaging, comparing and publishing are the loop's. No token depends on any of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ...core.config import DrafterTrainingConfig
from ...engine.admission import MB
from ...engine.drafters.head.feature_recorder import FeatureSequence
from ...learning.drafts.held_out import HOLD_OUT_EVERY, LearningRate, is_held_out
from ..actor_messages import HeadComparison, HeadProgress
from .idle_work import IdleWork

if TYPE_CHECKING:
    # they load transformers, which an instance without a head does not need
    from ...learning.drafts.features import FeatureBuffer
    from ...learning.drafts.head_trainer import HeadTrainer

HELD_OUT_SHARE = 0.125
"Of the buffer's bytes."
LEAST_TOKENS = 64
"Of a step. One that is stopped has taught nothing, so the next one is half as long; one that ends, twice."


class SpotTrainer:
    """Learns in idle time. Its methods are the decode thread's; none but those that pause it wait for a step."""

    def __init__(
        self,
        learner: HeadTrainer,
        buffer: FeatureBuffer,
        head: Mapping[str, Tensor],
        *,
        name: str,
        training: DrafterTrainingConfig,
        seed: int,
        finished: Callable[[], Sequence[FeatureSequence]],
        read_target: Callable[[], None] = lambda: None,
        begin: Callable[[], None] = lambda: None,
        count: Callable[[float, int], None] = lambda seconds, tokens: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Start its thread; nothing is learned before features arrive and it is allowed.

        Args:
            learner: holds the head and its optimizer.
            buffer: what is learned from; what is held out takes `HELD_OUT_SHARE` of its bytes beside it.
            head: the trained tensors as they were published.
            name: of the thread.
            training: bounds of memory and steps.
            seed: of what is drawn.
            finished: hands out what samples gave that finished since it was asked last.
            read_target: lets the learner read the target's weights anew.
            begin: called first on the thread.
            count: told the seconds and tokens of every step, on the thread.
            clock: seconds; of the thread's own work, by default: others may need its core.
        """
        self._learner, self._buffer, self._head = learner, buffer, dict(head)
        self._training = training
        self._rate = LearningRate(learner.learning_rate)
        self._rng = np.random.default_rng([seed, 0x5E07])
        self._finished, self._read_target = finished, read_target
        self._count, self._clock = count, clock
        self._lock = threading.Lock()
        "of the buffer; held for moments"
        self._num_arrived = 0
        self._held_out: deque[FeatureSequence] = deque()
        self._held_out_bytes = 0
        self._step_tokens = training.max_tokens_per_step
        self._num_steps = self._num_tokens = 0
        self._train_s = 0.0
        self._is_handed_over = False
        "what was learned is with the loop: anything learned now would be lost with its answer"
        self._idle = IdleWork(self._learn, name=name, begin=begin)

    @property
    def is_active(self) -> bool:
        """See `IdleWork`."""
        return self._idle.is_active

    def allow(self) -> None:
        """There are no samples: learn, from what has finished too."""
        self.gather()
        self._idle.allow()

    def stop_soon(self) -> None:
        """There will be some; returns at once, the operation under way is the last."""
        self._idle.stop_soon()

    def gather(self) -> None:
        """Take in what finished samples give to learn from; one in some is held out, to compare heads on."""
        new = self._finished()
        if not new:
            return
        with self._lock:
            for sequence in new:
                self._num_arrived += 1
                # the first that arrive are learned from: idle time may be short
                if is_held_out(self._num_arrived - HOLD_OUT_EVERY // 2):
                    self._hold_out(sequence)
                else:
                    self._buffer.add(sequence)
        self._is_handed_over = False
        self._idle.more()

    def target_changes(self) -> None:
        """The target is about to get other weights: stop reading it. Raises WaitTimeout."""
        self._idle.pause()

    def target_changed(self) -> None:
        """It has got them: another iteration begins. What has finished was of the old ones."""
        self.gather()
        with self._lock:
            self._buffer.next_iteration()
        self._read_target()

    def progress(self) -> tuple[HeadProgress, dict[str, np.ndarray]]:
        """What was done since the last published head, and the tensors that came of it; none where nothing was learned.

        It learns no more until the loop answers (`load`, `give_up`, `train_on`) or samples finish. Raises WaitTimeout.
        """
        self._idle.pause()
        failure = self._idle.failure
        progress = HeadProgress(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            train_s=self._train_s,
            held_out_tokens=sum(each.num_response_tokens for each in self._compared_on()),
            failure="" if failure is None else f"{type(failure).__name__}: {failure}",
        )
        if failure is not None or not self._num_tokens:
            return progress, {}
        self._is_handed_over = True
        return progress, {name: tensor.numpy() for name, tensor in self._learner.weights().items()}

    def compare(self, tensors: Mapping[str, Tensor]) -> HeadComparison:
        """Compare other weights with the published ones on what was held out. Raises WaitTimeout, ConfigError."""
        self._idle.pause()
        held_out = self._compared_on()
        own = self._learner.weights()
        losses = []
        for weights in (self._head, tensors):
            self._learner.load(weights)
            losses.append(self._learner.evaluate(held_out).loss if held_out else math.nan)
        self._learner.load(own)
        return HeadComparison(
            present=losses[0],
            tried=losses[1],
            num_tokens=sum(each.num_response_tokens for each in held_out),
        )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a head that was published. Raises WaitTimeout, ConfigError: it is another one."""
        self._idle.pause()
        self._head = dict(tensors)
        self._rate.taken()
        self._begin_from_published()

    def give_up(self) -> None:
        """Go back to the published head, and learn more slowly from there. Raises WaitTimeout."""
        self._idle.pause()
        self._rate.given_up()
        self._learner.forget_direction()
        self._begin_from_published()

    def train_on(self) -> None:
        """Go on from what was learned and handed over: it stands, though it is not published."""
        self._is_handed_over = False
        self._idle.more()

    def close(self) -> None:
        """End the thread after the operation under way."""
        self._idle.close()

    def _begin_from_published(self) -> None:
        self._learner.load(self._head)
        self._learner.learning_rate = self._rate.now
        self._num_steps = self._num_tokens = 0
        self._train_s = 0.0
        self._is_handed_over = False
        self._idle.more()

    def _learn(self, should_stop: Callable[[], bool]) -> bool:
        """One step; see `IdleWork`."""
        with self._lock:
            if self._is_handed_over:
                return False
            sequences = self._buffer.sample(self._rng, self._step_tokens)
        if not sequences:
            return False
        was_stopped = False

        def watched() -> bool:
            # an order may be over by the time that the step has ended: what it saw counts
            nonlocal was_stopped
            was_stopped = was_stopped or should_stop()
            return was_stopped

        began_s = self._clock()
        report = self._learner.step(sequences, watched)
        seconds = self._clock() - began_s
        self._train_s += seconds
        is_taken = report is not None and math.isfinite(report.grad_norm)
        tokens = report.num_anchors if report is not None and is_taken else 0
        self._count(seconds, tokens)
        if report is None:
            # stopped, or nothing in these could be learned from
            self._step_tokens = max(LEAST_TOKENS, self._step_tokens // 2)
            return was_stopped
        self._step_tokens = min(self._training.max_tokens_per_step, 2 * self._step_tokens)
        if not is_taken:
            # one of them has hidden states that would never give anything finite
            with self._lock:
                self._buffer.drop(sequences)
            return True
        with self._lock:
            self._buffer.learned(sequences, report.needs)
        self._num_steps += 1
        self._num_tokens += tokens
        return True

    def _hold_out(self, sequence: FeatureSequence) -> None:
        self._held_out.append(sequence)
        self._held_out_bytes += sequence.num_bytes
        room = self._training.buffer_mb * MB * HELD_OUT_SHARE
        while self._held_out_bytes > room and len(self._held_out) > 1:
            self._held_out_bytes -= self._held_out.popleft().num_bytes

    def _compared_on(self) -> list[FeatureSequence]:
        """Of what is held out the latest, as many tokens as a step has: the loop waits for a comparison."""
        chosen: list[FeatureSequence] = []
        room = self._training.max_tokens_per_step
        for sequence in reversed(self._held_out):
            room -= sequence.num_response_tokens
            if room < 0 and chosen:
                break
            chosen.append(sequence)
        return chosen
