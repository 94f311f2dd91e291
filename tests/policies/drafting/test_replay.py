"""Replay by hand: what the policy is asked, and the first difference that is found."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlhfspec.core.decode_records import PLAIN, Budget, DecodeState, DraftLog, StepRecord
from rlhfspec.policies.drafting.baselines import BanditPolicy, FixedPolicy
from rlhfspec.policies.drafting.draft_policy import DraftLaw, Proposal
from rlhfspec.policies.drafting.replay import Difference, replay

CHAIN = Budget(num_nodes=6, depth=6, branching=1, width=1, reason="chain", refined=True)
TREE = Budget(num_nodes=4, depth=6, branching=3, width=3, reason="tree", refined=True)


class Script(DraftLaw):
    """Returns one budget, answers `deepen` from a list by level and verifies what scores above a half."""

    max_nodes = 4

    def __init__(self, budget: Budget, answers: tuple[int, ...] = ()) -> None:
        self.budget = budget
        self.answers = answers
        self.asked: list[tuple[int, list[list[float]]]] = []
        self.observed: list[StepRecord] = []

    def plan(self, state: DecodeState) -> Budget:
        return self.budget

    def deepen(self, level: int, scores: np.ndarray) -> int:
        assert scores.dtype == np.float32 and scores.flags.c_contiguous
        self.asked.append((level, scores.tolist()))
        return self.answers[level]

    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        assert all(one.scores.shape[1] == sum(one.level_sizes) for one in proposals)
        return [(one.scores > 0.5).sum(axis=1) for one in proposals]

    def observe(self, record: StepRecord) -> None:
        self.observed.append(record)


def log_of(scores: list[list[float]], level_sizes: tuple[int, ...], num_nodes: list[int]) -> DraftLog:
    return DraftLog(
        scores=np.array(scores, dtype=np.float32),
        level_sizes=level_sizes,
        num_nodes=np.array(num_nodes),
        num_accepted=np.zeros(len(num_nodes), dtype=np.int64),
    )


def step(
    budget: Budget, draft: DraftLog | None = None, *, decode_step: int = 0, batch: int = 2
) -> StepRecord:
    return StepRecord(
        state=DecodeState(
            decode_step=decode_step, num_samples=batch, context_tokens=50, max_remaining_tokens=20
        ),
        budget=budget,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_accepted_rank2_plus=0,
        num_emitted_tokens=batch,
        draft_s=0.25,
        verify_s=0.25,
        accept_s=0.25,
        other_s=0.25,
        draft=draft,
    )


THREE = log_of([[0.75, 0.625, 0.25], [0.875, 0.125, 0.0625]], (1, 1, 1), [2, 1])


def test_a_chain_is_asked_with_ones_and_then_with_the_last_level_drafted() -> None:
    # two levels, one more, then enough: level 1 was drafted unasked
    policy = Script(CHAIN, (2, 9, 1, 0))
    assert replay(policy, [step(CHAIN, THREE)]) is None
    assert policy.asked == [
        (0, [[1.0], [1.0]]),
        (2, [[0.625], [0.125]]),
        (3, [[0.25], [0.0625]]),
    ]
    assert len(policy.observed) == 1


def test_nothing_is_asked_at_the_budgets_depth() -> None:
    shallow = replace(CHAIN, depth=3)
    policy = Script(shallow, (2, 9, 5))
    assert replay(policy, [step(shallow, THREE)]) is None
    assert [level for level, _ in policy.asked] == [0, 2]


def test_a_tree_shows_a_whole_level() -> None:
    draft = log_of([[0.75, 0.25, 0.125, 0.625, 0.5]], (2, 3), [2])
    policy = Script(TREE, (1, 1, 0))
    assert replay(policy, [step(TREE, draft, batch=1)]) is None
    assert policy.asked == [(0, [[1.0]]), (1, [[0.75, 0.25]]), (2, [[0.125, 0.625, 0.5]])]


def test_plain_and_unrefined_budgets_are_not_asked_about() -> None:
    for budget in (PLAIN, replace(CHAIN, refined=False)):
        policy = Script(budget)
        assert replay(policy, [step(budget)]) is None
        assert policy.asked == []


def test_a_refined_budget_may_end_before_its_first_level() -> None:
    assert replay(Script(CHAIN, (0,)), [step(CHAIN)]) is None
    assert replay(Script(CHAIN, (1,)), [step(CHAIN)]) == Difference(
        decode_step=0, what="levels", recorded=0, replayed=1
    )
    assert replay(Script(CHAIN, (0,)), [step(CHAIN, THREE)]) == Difference(
        decode_step=0, what="levels", recorded=3, replayed=0
    )


@pytest.mark.parametrize(
    ("change", "value"),
    [("num_nodes", 5), ("depth", 5), ("branching", 2), ("width", 2), ("reason", "other"), ("refined", False)],
)
def test_every_field_of_the_budget_counts(change: str, value: int | str | bool) -> None:
    difference = replay(Script(CHAIN, (0,)), [step(replace(CHAIN, **{change: value}))])
    assert difference == Difference(
        decode_step=0, what=f"budget.{change}", recorded=value, replayed=getattr(CHAIN, change)
    )


@pytest.mark.parametrize(
    ("answers", "levels"), [((2, 9, 0), 2), ((3, 9, 9, 2), 5), ((3, 9, 9, 9), 6), ((4,), 4)]
)
def test_a_chain_of_other_length_is_found(answers: tuple[int, ...], levels: int) -> None:
    difference = replay(Script(CHAIN, answers), [step(CHAIN, THREE)])
    assert difference == Difference(decode_step=0, what="levels", recorded=3, replayed=levels)


def test_other_numbers_of_nodes_and_other_scores_are_found() -> None:
    answers = (3, 9, 9, 0)
    counted = replace(THREE, num_nodes=np.array([2, 2]))
    assert replay(Script(CHAIN, answers), [step(CHAIN, counted)]) == Difference(
        decode_step=0, what="num_nodes", recorded=[2, 2], replayed=[2, 1]
    )
    scores = THREE.scores.copy()
    scores[0, 1] = 0.25
    assert replay(Script(CHAIN, answers), [step(CHAIN, replace(THREE, scores=scores))]) == Difference(
        decode_step=0, what="num_nodes", recorded=[2, 1], replayed=[1, 1]
    )


def test_a_log_that_contradicts_itself_is_found() -> None:
    torn = replace(THREE, level_sizes=(1, 1))
    assert replay(Script(CHAIN, (2, 9, 0)), [step(CHAIN, torn)]) == Difference(
        decode_step=0, what="draft", recorded=(2, 3), replayed=(2, 2)
    )
    unrefined = replace(CHAIN, refined=False)
    difference = replay(Script(unrefined), [step(unrefined, THREE)])
    assert difference is not None and difference.what == "draft"


def test_a_tree_may_stop_short_only_where_the_draft_cache_may_be_full() -> None:
    # two levels of three columns do fit into 4 + 2 behind the committed tokens, three levels need not
    two = log_of([[0.75] * 3 + [0.25] * 9], (3, 9), [3])
    three = log_of([[0.75] * 3 + [0.25] * 18], (3, 9, 9), [3])
    eager = (1,) * 6
    assert replay(Script(TREE, eager), [step(TREE, two, batch=1)]) == Difference(
        decode_step=0, what="levels", recorded=2, replayed=3
    )
    assert replay(Script(TREE, eager), [step(TREE, three, batch=1)]) is None
    # more levels than were asked for are never right
    assert replay(Script(TREE, (1, 1, 0)), [step(TREE, three, batch=1)]) == Difference(
        decode_step=0, what="levels", recorded=3, replayed=2
    )
    # a chain is not stopped, however long
    long = replace(CHAIN, depth=9)
    seven = log_of([[0.75] * 3 + [0.25] * 4], (1,) * 7, [3])
    assert replay(Script(long, (1,) * 9), [step(long, seven, batch=1)]) == Difference(
        decode_step=0, what="levels", recorded=7, replayed=8
    )


def test_the_first_difference_ends_the_replay() -> None:
    policy = Script(PLAIN)
    other = replace(PLAIN, reason="other")
    records = [step(PLAIN), step(other, decode_step=1), step(other, decode_step=2)]
    difference = replay(policy, records)
    assert difference is not None and difference.decode_step == 1
    assert [record.decode_step for record in policy.observed] == [0]


def test_a_missing_record_is_found() -> None:
    records = [step(PLAIN, decode_step=number) for number in (3, 4, 6)]
    assert replay(Script(PLAIN), records) == Difference(
        decode_step=6, what="decode_step", recorded=6, replayed=5
    )
    assert replay(Script(PLAIN), records[:2]) is None
    assert replay(Script(PLAIN), []) is None


def bandit_log(policy: BanditPolicy) -> list[StepRecord]:
    """200 decode steps of unlike batches; a draft token is worth the less the more there are."""
    records = []
    for number in range(200):
        state = DecodeState(
            decode_step=number, num_samples=1 + number // 20, context_tokens=99, max_remaining_tokens=40
        )
        budget = policy.plan(state)
        record = replace(
            step(budget, decode_step=number),
            state=state,
            num_emitted_tokens=state.num_samples + (number * 7) % (budget.num_nodes + 1),
            draft_s=0.125 * budget.depth,
        )
        policy.observe(record)
        records.append(record)
    return records


def test_a_bandits_log_replays_and_a_changed_reward_is_found() -> None:
    records = bandit_log(BanditPolicy(max_nodes=8, max_depth=8, seed=3))
    assert len({record.budget.num_nodes for record in records}) >= 4
    assert any("by chance" in record.budget.reason for record in records)
    assert replay(BanditPolicy(max_nodes=8, max_depth=8, seed=3), records) is None
    assert replay(BanditPolicy(max_nodes=8, max_depth=8, seed=4), records) is not None
    number = next(i for i, record in enumerate(records) if "exploit" in record.budget.reason)
    records[number] = replace(records[number], num_emitted_tokens=500)
    difference = replay(BanditPolicy(max_nodes=8, max_depth=8, seed=3), records)
    assert difference is not None and difference.decode_step > number


def test_a_fixed_tree_replays_from_any_step() -> None:
    policy = FixedPolicy(num_nodes=8, depth=8, branching=1)
    states = [
        DecodeState(decode_step=5 + n, num_samples=40 - n, context_tokens=99, max_remaining_tokens=40)
        for n in range(40)
    ]
    records = [replace(step(policy.plan(state)), state=state) for state in states]
    assert replay(FixedPolicy(num_nodes=8, depth=8, branching=1), records) is None
    difference = replay(FixedPolicy(num_nodes=4, depth=8, branching=1), records)
    assert difference is not None and difference.what == "budget.num_nodes"
