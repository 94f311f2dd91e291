"""What decides how much is drafted and verified (design 3.2): a policy by budgets alone, a law over proposals too.

Phase one, `plan`, runs on the host from facts of earlier decode steps and returns a `Budget`. Phase two is the
choice of nodes by score: a tensor operation of the engine with static shapes (`engine.decoding.draft_tree`), or, for
a refined budget, the law's: drafters propose one after the other, what is looked up before what is computed.

    is_enough   after a look-up: is anything to be computed beside it?
    deepen      while a draft is computed: how many levels more?
    choose      at the end: how many candidates of which proposal are verified for each sample

All are pure: equal records and scores in, equal decisions out; no clock, no hidden randomness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from ...core.decode_records import Budget, DecodeState, StepRecord


@runtime_checkable
class DraftPolicy(Protocol):
    """Chooses how much to draft and verify in the next decode step."""

    @property
    def max_nodes(self) -> int:
        """The largest `Budget.num_nodes` this policy ever returns: the KV pool reserves it."""
        ...

    def plan(self, state: DecodeState) -> Budget:
        """Return the next decode step's budget; `reason` says why."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Take note of what the last decode step did."""
        ...


class Proposal(NamedTuple):
    """What one drafter offers the running samples: candidates, of which each verifies its best by score."""

    scores: np.ndarray
    "[B, C] float32: estimated probability that the whole path to a candidate is accepted, level by level; 0: none"
    level_sizes: tuple[int, ...]
    "candidates of each level; their sum is C"
    seconds: float = 0.0
    "that a look-up took"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterAlarm:
    """A drafter that stopped being accepted, as the decode step that noticed it saw it."""

    decode_step: int
    drafter_age_steps: int
    "decode steps since these drafter weights came"
    observed: float
    "acceptance of first nodes of late"
    usual: float

    def text(self, *, checksum: str, version: int) -> str:
        """Say it to people; `checksum` of the drafter's weights, "" where it has none."""
        which = f"checksum {checksum}, " if checksum else ""
        return (
            f"decode step {self.decode_step}: first draft tokens are accepted {self.observed:.2f} of late, usually "
            f"{self.usual:.2f}; drafter {which}version {version}, {self.drafter_age_steps} decode steps old; plain "
            "decoding until probes are accepted again"
        )


class DraftLaw(ABC):
    """A `DraftPolicy` that returns refined budgets: it is asked while drafters propose, and chooses."""

    max_nodes: int

    @abstractmethod
    def plan(self, state: DecodeState) -> Budget:
        """See `DraftPolicy`."""

    def is_enough(self, look_up: Proposal) -> bool:
        """Return whether nothing is to be computed beside what was looked up."""
        return False

    @abstractmethod
    def deepen(self, level: int, scores: np.ndarray) -> int:
        """Return how many more levels to draft before asking again; 0 ends the draft.

        Args:
            level: levels drafted so far; 0 before the first.
            scores: path estimates of the last level's candidates, [B, c]; ones for the roots.
        """

    @abstractmethod
    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        """Return how many candidates of each proposal each sample verifies, int [B] each; of one proposal at most."""

    @abstractmethod
    def observe(self, record: StepRecord) -> None:
        """See `DraftPolicy`."""

    def take_alarm(self) -> DrafterAlarm | None:
        """Return the alarm over the drafter that has been raised since the last call, once."""
        return None
