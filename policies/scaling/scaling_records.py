"""What the scaling rule is shown, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from .forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the pool's size; as `cluster.generation` has them."""

    least: int
    most: int
    idle_timeout_s: float
    "an instance that is not needed for so long leaves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """What the loop knows and the scheduler does not: instances on their way, and what is to come."""

    num_starting: int = 0
    start_up_s: float = 0.0
    "from the decision to the first sample, as last measured"
    rollouts_ahead: int = 0
    "that the run will still ask for after the present one"
    is_blocked: bool = False
    "a start has failed of late: none for now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An instance that may leave."""

    instance: str
    num_samples: int
    idle_s: float
    "seconds for which it has had none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """One moment of a pool."""

    num_alive: int
    "that take samples"
    num_open: int
    "samples that are not done"
    candidates: tuple[Candidate, ...]
    "instances that may leave"
    forecast: Forecast
    "of the open samples"
    starts: Starts = Starts()
    surplus_s: float = 0.0
    "seconds for which one instance less would have done"

    @property
    def num_coming(self) -> int:
        """Instances there are or will be."""
        return self.num_alive + self.starts.num_starting


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """A change of the pool."""

    target: int
    "instances there are to be, those that start included"
    leave: tuple[str, ...] = ()
    "these, once they are empty"
    reason: str
    "as a sentence"
