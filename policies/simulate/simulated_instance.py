"""Instances and trainer of a simulated pool, and the machine that they may share.

All samples of an instance get tokens at one speed, set by their number and their contexts.
Seconds per token are a line in the context tokens of all samples together, and these grow with every token: progress
of p takes pace * p + growth / 2 * p^2 seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.decode_records import GenerationStats, InstanceLoad
from ..reallocation.rate_curve import RateCurve


@dataclass(frozen=True, slots=True)
class PaceLine:
    """Seconds per token of B samples: `base_s[B] + context_token_s[B] * context`, for B up to the slots."""

    base_s: Sequence[float]
    context_token_s: Sequence[float]
    chain_s: Sequence[float] = ()
    "more of each of B samples that verifies a long chain; nothing where none does"

    @classmethod
    def of(cls, curve: RateCurve, num_slots: int) -> PaceLine:
        """What the curve has."""
        counts = np.arange(num_slots + 1)
        return cls(curve.seconds_per_token(counts, 0.0).tolist(), curve.context_token_s(counts).tolist())

    def times(self, factor: float) -> PaceLine:
        """The same with everything so many times as long."""
        parts = self.base_s, self.context_token_s, self.chain_s
        return PaceLine(*([factor * s for s in part] for part in parts))


class SimulatedInstance:
    """Progress is counted in tokens of a mean sample since the start; time only moves forward."""

    def __init__(self, name: str, line: PaceLine, bystander_share: float, *, now_s: float = 0.0) -> None:
        """Start idle; `line` may be replaced by another while the instance is up to date."""
        self.name, self.line = name, line
        self._bystander_share = bystander_share
        self.now_s = now_s
        self.waiting: deque[int] = deque()
        "samples that it has and does not run yet"
        self.unreported: list[int] = []
        "samples that have ended here, and the scheduler does not know it"
        self.reported_s = -math.inf
        "when it told of some last"
        self.num_reserved = 0
        "slots kept for samples on their way here"
        self.num_changes = 0
        self.progress = 0.0
        self.busy_s = 0.0
        self.blocked_until_s = 0.0
        "a prefill holds the decode steps up"
        self.num_transfers = 0
        self.running: dict[int, float] = {}
        "sample -> progress at which it is done"
        self.attempts: list[int] = []
        "of these the ones that any other may take the slot of, in the order in which they began"
        self.proving: set[int] = set()
        "of these the ones that verify long chains"
        self._ends: list[tuple[float, int]] = []
        self._contexts: dict[int, tuple[float, float]] = {}
        "sample -> context tokens less its speed times progress; speed"
        self._context = 0.0
        "the sum of the former"
        self._speed = 0.0
        "the sum of the latter: context tokens by which the instance grows with progress"

    @property
    def context_tokens(self) -> float:
        """Of all samples now."""
        return self._context + self._speed * self.progress

    @property
    def goodput(self) -> float:
        """Tokens of mean samples per second, transfers aside; 0 without samples."""
        return len(self.running) / self._curve()[0] if self.running else 0.0

    def load(self) -> InstanceLoad:
        """What it reports of itself."""
        return InstanceLoad(
            instance=self.name,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_slots=0,
            context_tokens=int(self.context_tokens),
            weight_version=0,
            drafter_version=0,
            decode_step=0,
            goodput_tokens_per_s=self.goodput,
            goodput_samples=float(len(self.running)),
            stats=GenerationStats(),
        )

    def is_busy(self, now_s: float) -> bool:
        """Whether it computes anything."""
        return bool(self.running) or self.blocked_until_s > now_s

    def _curve(self) -> tuple[float, float]:
        """Seconds per token now, and what they grow by with each."""
        token_s = self.line.context_token_s[len(self.running)]
        pace = self.line.base_s[len(self.running)] + token_s * self.context_tokens
        if self.proving:
            pace += len(self.proving) * self.line.chain_s[len(self.running)]
        return pace, token_s * self._speed

    def _line(self) -> tuple[float, float]:
        """The same while transfers go on, if any do."""
        slower = 1.0 + (self._bystander_share if self.num_transfers else 0.0)
        pace, growth = self._curve()
        return pace * slower, growth * slower

    def advance(self, now_s: float) -> None:
        """Let time pass; no sample may end before `now_s`."""
        held_s = min(max(self.blocked_until_s - self.now_s, 0.0), now_s - self.now_s)
        self.busy_s += held_s
        if self.running:
            decoding_s = now_s - self.now_s - held_s
            self.busy_s += decoding_s
            pace, growth = self._line()
            self.progress += 2.0 * decoding_s / (pace + math.sqrt(pace**2 + 2.0 * growth * decoding_s))
        self.now_s = now_s

    def block(self, seconds: float) -> float:
        """Hold decode steps up for so long; return until when."""
        self.blocked_until_s = max(self.blocked_until_s, self.now_s) + seconds
        return self.blocked_until_s

    def add(self, sample: int, tokens_to_go: float, *, context_tokens: float, speed: float = 1.0) -> None:
        """Take a sample; the instance is up to date.

        Args:
            sample: its number.
            tokens_to_go: what it needs, in tokens of a mean sample.
            context_tokens: prompt and response so far.
            speed: its own tokens for one of the mean sample.
        """
        end = self.progress + tokens_to_go
        self.running[sample] = end
        heapq.heappush(self._ends, (end, sample))
        self._contexts[sample] = (context_tokens - speed * self.progress, speed)
        self._context += self._contexts[sample][0]
        self._speed += speed

    def context_of(self, sample: int) -> float:
        """Context tokens of a running sample now."""
        before, speed = self._contexts[sample]
        return before + speed * self.progress

    def remove(self, sample: int) -> tuple[float, float]:
        """Give a sample up; returns what it still needs, and its context tokens."""
        context = self.context_of(sample)
        self.proving.discard(sample)
        before, speed = self._contexts.pop(sample)
        self._context, self._speed = self._context - before, self._speed - speed
        if not self._contexts:
            # nothing is left of rounding either
            self._context = self._speed = 0.0
        return self.running.pop(sample) - self.progress, context

    def next_end(self) -> tuple[float, int] | None:
        """When the next sample will be done if nothing changes, and which."""
        while self._ends and self.running.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        end, sample = self._ends[0]
        start_s = max(self.now_s, self.blocked_until_s)
        pace, growth = self._line()
        to_go = max(end - self.progress, 0.0)
        return start_s + to_go * (pace + growth / 2.0 * to_go), sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMachine:
    """Every instance, and the trainer while it works, keeps one core busy."""

    cores: int
    slowdown: float
    "seconds of a piece of work while all cores are busy over those of the same while one is: memory is shared"
    background: float = 0.0
    "cores that anything else keeps busy while an instance works, on average: scheduler, rewards, whatever runs there"
    resting: float = 0.0
    "the same while none does"

    def factor(self, num_instances: int, *, trainer: bool = False) -> float:
        """How many times as long everything takes with these at work as with one of them and nothing else.

        Cores are shared out evenly.
        """
        at_work = max(num_instances + trainer, 1) + (self.background if num_instances else self.resting)
        others = (min(at_work, self.cores) - 1.0) / (self.cores - 1) if self.cores > 1 else 0.0
        return (1.0 + (self.slowdown - 1.0) * others) * max(at_work / self.cores, 1.0)


class TrainerWork:
    """What is left of an update, in seconds that it takes where nothing else is busy."""

    def __init__(self) -> None:
        self.left_s = 0.0
        self._now_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether there is any."""
        return self.left_s > 0.0

    def begin(self, now_s: float, seconds: float) -> None:
        """Take an update on."""
        self._now_s, self.left_s = now_s, seconds

    def advance(self, now_s: float, factor: float) -> None:
        """Let time pass, in which everything took `factor` times as long."""
        if self.left_s:
            self.left_s = max(self.left_s - (now_s - self._now_s) / factor, 0.0)
            if self.left_s < 1e-9:
                self.left_s = 0.0
        self._now_s = now_s

    def end_s(self, factor: float) -> float:
        """When it will be done if everything goes on taking `factor` times as long."""
        return self._now_s + self.left_s * factor
