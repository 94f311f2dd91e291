"""Processes that share the cores of a machine: how much longer each takes; the trainer beside the instances."""

from __future__ import annotations

from dataclasses import dataclass


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
