"""The two-phase protocol of draft policies (design 3.2).

Phase one, `plan`, runs on the host from facts of earlier decode steps and returns a `Budget`.
Phase two, the selection of nodes by score, is a tensor operation of the engine with static shapes
(`engine.tree`). A policy is pure: equal records in, equal budgets out; no clock, no hidden randomness.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from core.records import Budget, DecodeState, StepRecord


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
