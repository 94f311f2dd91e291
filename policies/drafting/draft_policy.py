"""The two-phase protocol of draft policies (design 3.2).

Phase one, `plan`, runs on the host from facts of earlier decode steps and returns a `Budget`. Phase two is the
selection of nodes by score: a tensor operation of the engine with static shapes (`engine.decoding.draft_tree`), or,
for a refined budget, a conversation: `deepen` after every level, `select` at the end. A policy is pure: equal records
and scores in, equal decisions out; no clock, no hidden randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from rlhfspec.core.decode_records import Budget, DecodeState, StepRecord


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


@runtime_checkable
class WatchfulPolicy(Protocol):
    """Notices when the drafter stops being accepted."""

    def take_alarm(self) -> DrafterAlarm | None:
        """Return the alarm that has been raised since the last call, once."""
        ...


@runtime_checkable
class RefiningPolicy(DraftPolicy, Protocol):
    """Returns refined budgets, and is asked again while the draft grows."""

    def deepen(self, level: int, scores: np.ndarray) -> int:
        """Return how many more levels to draft before asking again; 0 ends the draft.

        Args:
            level: levels drafted so far; 0 before the first.
            scores: path estimates of the last level's candidates, [B, c]; ones for the roots.
        """
        ...

    def select(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        """Return how many candidates of each sample to verify, int [B]: its best by score.

        Args:
            scores: all candidates' path estimates, [B, C], level by level.
            level_sizes: candidates of each level.
        """
        ...


@runtime_checkable
class PairedPolicy(RefiningPolicy, Protocol):
    """Chooses, sample by sample, between what is computed and what is looked up: budgets with `look_up`.

    `looks_up_alone` is asked first; where it says no, `deepen` follows as ever, and at the end `select_either`.
    """

    def looks_up_alone(self, looked_up: np.ndarray) -> bool:
        """Return whether nothing is to be computed. `looked_up`: path estimates, [B, L]; 0 where there is nothing."""
        ...

    def select_either(
        self, computed: np.ndarray, level_sizes: tuple[int, ...], looked_up: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which samples verify what was looked up, bool [B], and how many nodes of each, int [B].

        Args:
            computed: all candidates' path estimates, [B, C], as `select` has them; C is 0 where there are none.
            level_sizes: candidates of each level.
            looked_up: as of `looks_up_alone`.
        """
        ...
