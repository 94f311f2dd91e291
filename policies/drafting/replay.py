"""Feeds a recorded step log to a fresh policy and compares every decision (design 3.2: policies are pure).

The policy is asked what the engine asked it, in the same order, and shown what the engine showed it:

    plan       with the state; the whole budget must be equal, its reason included
    is_enough  refined budgets (`DraftLaw`): with the first proposal, what was looked up; no level is asked for then
    deepen     else: after no level with ones, then whenever the levels it asked for are drafted, with the last level's
               scores; until it answers 0 or the budget's depth is reached; the levels must be as many
    choose     with all proposals; every sample's number of nodes of each must be equal
    observe    with the record

The log must begin with the policy's first decode step; a ring that has lost its head replays only a policy without
memory. One thing the log does not hold is the room left in the draft cache: a tree whose next level does not fit is
stopped, and the policy is not asked. The pool reserves `max_nodes` tokens and the root's behind the longest
response, so this can happen only to a tree that would expand more nodes than these; fewer levels than the policy
asks for are allowed there and nowhere else. (`deepen` may so be asked once more than it was: it keeps no state.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from ...core.decode_records import Budget, DraftLog, StepRecord
from .draft_policy import DraftLaw, DraftPolicy, Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first decision that a replay did not reproduce."""

    decode_step: int
    what: str
    "`budget.` and the field, `levels`, `num_nodes`, `used`; or of the log itself: `decode_step`, `draft`"
    recorded: object
    replayed: object


def replay(policy: DraftPolicy, records: Iterable[StepRecord]) -> Difference | None:
    """Return the first difference, None when every decision is reproduced.

    Args:
        policy: made as the recorded one was, and fresh; it is used up.
        records: a step log in order, from the policy's first decode step on.
    """
    expected_step: int | None = None
    for record in records:
        step = record.decode_step
        if expected_step is not None and step != expected_step:
            return Difference(decode_step=step, what="decode_step", recorded=step, replayed=expected_step)
        expected_step = step + 1
        difference = _planned(policy, record) or _chosen(policy, record)
        if difference is not None:
            return difference
        policy.observe(record)
    return None


def _planned(policy: DraftPolicy, record: StepRecord) -> Difference | None:
    budget = policy.plan(record.state)
    for field in fields(Budget):
        recorded, replayed = getattr(record.budget, field.name), getattr(budget, field.name)
        if recorded != replayed:
            return _difference(record, f"budget.{field.name}", recorded, replayed)
    return None


def _chosen(policy: DraftPolicy, record: StepRecord) -> Difference | None:
    """Compare the conversation about a refined budget."""
    draft = record.draft
    if not record.budget.refined or not isinstance(policy, DraftLaw):
        return None if draft is None else _difference(record, "draft", "refined", "not refined")
    sizes = () if draft is None else draft.level_sizes
    if draft is not None and draft.scores.shape != (record.num_samples, sum(sizes)):
        return _difference(record, "draft", draft.scores.shape, (record.num_samples, sum(sizes)))
    none = np.zeros((record.num_samples, 0), dtype=np.float32)
    proposals = [Proposal(none if draft is None else draft.scores, sizes)]
    look_up = None if draft is None else draft.look_up
    if look_up is not None:
        beside = Proposal(look_up.scores, (1,) * look_up.scores.shape[1], look_up.seconds)
        proposals = [beside, *proposals] if sizes else [beside]
    # what was looked up alone is whole
    enough = 0 if look_up is not None else len(sizes)
    levels = enough if policy.is_enough(proposals[0]) else _levels(policy, record, sizes)
    stopped = levels > len(sizes) and _may_lack_room(record.budget, sizes, policy.max_nodes)
    if levels != len(sizes) and not stopped:
        return _difference(record, "levels", len(sizes), levels)
    if draft is None:
        return None
    counts = policy.choose(proposals)
    num_nodes, used = sum(counts), counts[0] > 0
    if look_up is not None and not np.array_equal(used, look_up.used):
        return _difference(record, "used", look_up.used.tolist(), used.tolist())
    if not np.array_equal(num_nodes, draft.num_nodes):
        return _difference(record, "num_nodes", draft.num_nodes.tolist(), np.asarray(num_nodes).tolist())
    return None


def _levels(policy: DraftLaw, record: StepRecord, sizes: tuple[int, ...]) -> int:
    """Return how many levels the policy asks for; where that is more than were drafted, what it asked for last."""
    asked, shown = 0, np.ones((record.num_samples, 1), dtype=np.float32)
    while asked < record.budget.depth:
        more = policy.deepen(asked, shown)
        if more <= 0:
            break
        asked = min(record.budget.depth, asked + more)
        if asked > len(sizes):
            break
        shown = _scores_of(record.draft, asked)
    return asked


def _scores_of(draft: DraftLog | None, level: int) -> np.ndarray:
    """Return a level's scores, [B, c], laid out as the engine shows them."""
    assert draft is not None, "a level was drafted"
    start = sum(draft.level_sizes[: level - 1])
    return np.ascontiguousarray(draft.scores[:, start : start + draft.level_sizes[level - 1]])


def _may_lack_room(budget: Budget, sizes: tuple[int, ...], max_nodes: int) -> bool:
    """True for a tree whose next level needs more columns of the draft cache than the pool reserves.

    A running sample misses one token at least, so that with `max_nodes` and the root's there are max_nodes + 2.
    """
    columns = sum(min(budget.width, size) for size in sizes)
    return budget.branching > 1 and len(sizes) > 0 and columns > max_nodes + 2


def _difference(record: StepRecord, what: str, recorded: object, replayed: object) -> Difference:
    return Difference(decode_step=record.decode_step, what=what, recorded=recorded, replayed=replayed)
