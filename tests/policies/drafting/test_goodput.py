"""The goodput policy on hand-made profiles, with drafters on paper: it drafts where it pays, and seldom where not."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hand_profile import (
    PaperDrafter,
    PaperRun,
    decode_state,
    goodput,
    hand_cost,
    hand_profile,
    total_s,
)

from rlhfspec.core.decode_records import StepRecord
from rlhfspec.policies.drafting.cadence import LARGE_BATCH_SEARCH_STEPS, Cadence
from rlhfspec.policies.drafting.cost_view import BatchCosts
from rlhfspec.policies.drafting.goodput import GoodputPolicy
from rlhfspec.policies.drafting.recalibration import TrackRecord
from rlhfspec.policies.drafting.shape_search import ShapeTable
from rlhfspec.profiles.cost import CostModel
from rlhfspec.profiles.profile import Profile, YieldCurve

CHEAP = hand_cost(forward_ms=10.0, token_ms=0.02, level_ms=0.5, draft_token_ms=0.01)
"A token more costs next to nothing, a level a twentieth of a forward."
DEAR = hand_cost(forward_ms=1.0, token_ms=9.0, level_ms=5.0)
"Every token costs nine forwards: what is drafted never pays."
KNEE = hand_cost(forward_ms=10.0, token_ms=0.02, knee_ms=0.8, level_ms=0.5, draft_token_ms=0.02)
"Flat up to 16 tokens."
TREE = YieldCurve(branching=2, width=2, levels=4, curve=(0.0, 0.6, 0.9, 1.1, 1.25, 1.35, 1.4, 1.45, 1.5))


def make_policy(profile: Profile, max_nodes: int = 12, max_depth: int = 12) -> Cadence:
    return Cadence(GoodputPolicy(profile, max_nodes=max_nodes, max_depth=max_depth))


def run_of(
    acceptance: float, cost: CostModel, *, truth: float | None = None, seed: int = 0, **kw
) -> PaperRun:
    """A policy that was told `acceptance`, with a drafter that keeps to `truth`."""
    truth = acceptance if truth is None else truth
    return PaperRun(
        policy=make_policy(hand_profile(acceptance, cost, **kw)),
        cost=cost,
        random=np.random.default_rng(seed),
        drafter=PaperDrafter(truth=truth, shown=acceptance),
    )


def nodes_per_sample(records: list[StepRecord]) -> float:
    return float(np.mean([record.num_draft_tokens / record.num_samples for record in records]))


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_decodes_plainly_and_says_so_where_verification_is_expensive(batch: int) -> None:
    run = run_of(0.9, DEAR)
    records = run.steps(40, batch)
    assert all(record.budget.is_plain for record in records)
    assert {record.budget.reason for record in records} == {f"drafting does not pay; B={batch}"}


@pytest.mark.parametrize(("acceptance", "most", "least"), [(0.95, 12, 8), (0.5, 4, 1)])
def test_a_better_drafter_gets_deeper_drafts(acceptance: float, most: int, least: int) -> None:
    records = run_of(acceptance, CHEAP).steps(50, 1)
    assert not any(record.budget.is_plain for record in records)
    assert least <= nodes_per_sample(records) <= most


@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
def test_depth_is_near_the_best_constant_depth(acceptance: float) -> None:
    records = run_of(acceptance, CHEAP).steps(400, 1)
    # expected tokens over seconds of a chain of d nodes, by hand
    depth = np.arange(13)
    tokens = 1 + np.array([(acceptance ** np.arange(1, d + 1)).sum() for d in depth])
    seconds = 1e-3 * (10.2 + 0.02 * (1 + depth) + 0.51 * depth)
    # sampling error of 400 steps is about 3%
    assert goodput(records) > 0.92 * (tokens / seconds).max()


def test_fewer_nodes_at_larger_batches_behind_a_knee() -> None:
    nodes = [nodes_per_sample(run_of(0.8, KNEE).steps(30, batch)) for batch in (1, 4, 8, 32)]
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] >= 4 and nodes[-1] <= 1.5


@pytest.mark.parametrize("batch", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("acceptance", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("cost", [CHEAP, KNEE, DEAR], ids=["cheap", "knee", "dear"])
def test_goodput_is_never_below_plain_decoding(cost: CostModel, acceptance: float, batch: int) -> None:
    run = run_of(acceptance, cost)
    records = run.steps(200, batch)
    plain = run_of(acceptance, cost)
    plain.policy = make_policy(hand_profile(acceptance, DEAR))
    plain_s = total_s(plain.steps(1, batch))
    # noise of the outcomes where drafting pays, a hundredth of the time for probes where it does not
    assert goodput(records) > 0.97 * batch / plain_s


@pytest.mark.parametrize("remaining", [1, 2, 3, 7])
def test_no_plan_goes_beyond_the_remaining_tokens(remaining: int) -> None:
    policy = make_policy(hand_profile(0.95, CHEAP))
    budget = policy.plan(decode_state(0, 2, remaining=remaining))
    assert budget.depth <= remaining - 1
    assert budget.is_plain == (remaining == 1)
    assert budget.reason


def test_no_probe_goes_beyond_the_remaining_tokens() -> None:
    run = run_of(0.02, CHEAP)
    records = run.steps(600, 1, remaining=2)
    probes = [record for record in records if not record.budget.is_plain]
    assert probes
    assert all(record.budget.depth == 1 for record in probes)


@pytest.mark.parametrize("max_nodes", [1, 2, 3])
def test_limits_of_one_to_three_nodes_are_kept(max_nodes: int) -> None:
    for acceptance in (0.02, 0.95):
        policy = make_policy(hand_profile(acceptance, CHEAP), max_nodes, max_nodes)
        run = PaperRun(
            policy=policy,
            cost=CHEAP,
            random=np.random.default_rng(0),
            drafter=PaperDrafter(truth=acceptance, shown=acceptance),
        )
        records = run.steps(400, 2)
        drafted = [record for record in records if record.draft is not None]
        assert drafted
        assert max(int(record.draft.num_nodes.max()) for record in drafted if record.draft) <= max_nodes
        assert max(record.budget.depth for record in records) <= max_nodes


@pytest.mark.parametrize("batch", [1, 3, 24])
def test_no_sample_gets_more_than_max_nodes_between_searches(batch: int) -> None:
    policy = make_policy(hand_profile(0.9, CHEAP), max_nodes=4, max_depth=4)
    for step in range(2 * LARGE_BATCH_SEARCH_STEPS):
        policy.plan(decode_state(step, batch))
        # a tree's candidates, more than can be verified
        counts = policy.select(np.full((batch, 9), 0.95), (3, 6))
        assert counts.tolist() == [4] * batch


# --- a drafter that dies


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("acceptance", [0.8, 0.9])
def test_a_dead_drafter_is_suspended_within_ten_steps_with_one_alarm(acceptance: float, batch: int) -> None:
    run = run_of(acceptance, CHEAP)
    run.steps(50, batch)
    assert run.policy.law.take_alarm() is None
    run.drafter.truth = 0.0
    records = run.steps(200, batch)
    assert all(r.budget.is_plain or r.budget.reason == "probe of the drafter" for r in records[10:])
    suspended = next(n for n, record in enumerate(records) if "suspended" in record.budget.reason)
    assert suspended <= 10
    alarm = run.policy.law.take_alarm()
    assert alarm is not None
    assert 50 <= alarm.decode_step < 60
    assert alarm.drafter_age_steps == alarm.decode_step
    # two steps of nothing accepted take 0.36 of what was accepted of late
    assert alarm.observed < 0.65 < 0.75 < alarm.usual
    assert run.policy.law.take_alarm() is None


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_probes_of_a_dead_drafter_take_two_percent_of_the_time_at_most(batch: int) -> None:
    run = run_of(0.9, CHEAP, truth=0.0)
    run.steps(20, batch)
    records = run.steps(1500, batch)
    plain_s = total_s([record for record in records if record.budget.is_plain][:1])
    probes = [record for record in records if not record.budget.is_plain]
    assert probes
    wasted_s = sum(record.step_s - plain_s for record in probes)
    assert wasted_s <= 0.021 * total_s(records)


@pytest.mark.parametrize(("batch", "token_ms", "most"), [(1, 0.01, 100), (32, 0.01, 1000), (4, 0.2, 4000)])
def test_a_recovered_drafter_is_resumed_even_where_catching_up_is_expensive(
    batch: int, token_ms: float, most: int
) -> None:
    run = run_of(0.9, hand_cost(token_ms=0.02, level_ms=0.5, draft_token_ms=token_ms), truth=0.0)
    run.steps(30, batch)
    assert "suspended" in run.policy.plan(decode_state(30, batch)).reason
    run.drafter.truth = 1.0
    while "suspended" in (reason := run.steps(20, batch)[-1].budget.reason) or "probe" in reason:
        assert run.step < most


def test_a_recovered_drafter_is_used_again() -> None:
    run = run_of(0.9, CHEAP, truth=0.0)
    run.steps(40, 1)
    run.drafter.truth = 0.9
    run.steps(600, 1)
    assert "tokens/s expected" in run.steps(1, 1)[0].budget.reason


def test_a_suspension_by_one_sample_ends_within_four_steps_of_a_larger_batch() -> None:
    run = run_of(0.9, CHEAP)
    run.steps(30, 8)
    run.drafter.truth = 0.0
    run.steps(12, 1)
    assert "suspended" in run.policy.plan(decode_state(run.step, 1)).reason
    run.drafter.truth = 0.9
    reasons = [record.budget.reason for record in run.steps(8, 8)]
    assert reasons[0] == "probe of the drafter"
    assert "tokens/s expected" in reasons[4]


@pytest.mark.parametrize("batch", [8, 16, 32])
def test_low_acceptance_in_a_rollouts_tail_does_not_stop_drafting_in_the_next_rollout(batch: int) -> None:
    run = run_of(0.9, hand_cost(token_ms=0.5, level_ms=0.5))
    run.steps(20, 8)
    # deep in a response most drafts fail, though not all: no collapse
    run.drafter.truth = 0.45
    run.steps(60, 1)
    run.drafter.truth = 0.9
    records = run.steps(12, batch)
    assert not any(record.budget.is_plain for record in records)


def test_a_larger_batch_does_not_probe_where_drafting_never_pays() -> None:
    run = run_of(0.02, DEAR)
    run.steps(2000, 1)
    assert run.steps(1, 32)[0].budget.is_plain


def test_new_drafter_weights_end_the_suspension() -> None:
    run = run_of(0.9, CHEAP, truth=0.0)
    run.steps(40, 2)
    run.drafter_version, run.drafter.truth = 1, 0.9
    records = run.steps(30, 2)
    assert not any(record.budget.is_plain for record in records)
    run.drafter.truth = 0.0
    run.steps(20, 2)
    alarm = run.policy.law.take_alarm()
    assert alarm is not None
    alarm = run.policy.law.take_alarm() or alarm
    assert alarm.drafter_age_steps == alarm.decode_step - 40


# --- a drafter that is useless from the beginning


USELESS_TREE = replace(TREE, curve=(0.0, 0.0, 0.02, 0.02, 0.03, 0.03, 0.03, 0.03, 0.03))


@pytest.mark.parametrize("batch", [1, 4, 16, 32])
@pytest.mark.parametrize("acceptance", [0.0, 0.01])
@pytest.mark.parametrize("trees", [(), (USELESS_TREE,)], ids=["chain", "tree"])
def test_probes_of_a_useless_drafter_take_one_percent_of_the_time_at_most(
    trees: tuple[YieldCurve, ...], acceptance: float, batch: int
) -> None:
    run = run_of(acceptance, CHEAP, trees=trees)
    run.drafter.shown = 0.02
    records = run.steps(1000, batch)
    assert records[0].budget.is_plain
    plain_s = records[0].step_s
    wasted_s = sum(record.step_s - plain_s for record in records if not record.budget.is_plain)
    assert wasted_s <= 0.011 * total_s(records)
    assert all(
        record.budget.reason in (f"drafting does not pay; B={batch}", "probe of the drafter")
        for record in records
    )


# --- a profile that is wrong about what a node costs


@pytest.mark.parametrize("shown", [0.4, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_loses_by_its_costs_is_not_tried_again_because_weights_are_new(shown: float, seed: int) -> None:
    told, truth = (hand_cost(token_ms=token_ms) for token_ms in (0.1, 0.5))
    run = run_of(shown, told, truth=0.4, seed=seed)
    run.cost = truth
    # one node for each of 16 samples takes 27.2 ms and yields 1.4 tokens, plain decoding takes 18.2
    records = run.steps(60, 16)
    assert {record.num_draft_tokens for record in records[:16]} == {16}
    assert all(record.budget.is_plain for record in records[20:])
    run.weight_version += 1
    assert all(record.budget.is_plain for record in run.steps(16, 16))


@pytest.mark.parametrize("behind_plain_steps", [False, True])
def test_a_draft_that_fills_the_draft_cache_says_nothing_of_costs(behind_plain_steps: bool) -> None:
    policy = GoodputPolicy(hand_profile(0.8, CHEAP), max_nodes=12, max_depth=12)
    run = run_of(0.8, hand_cost(forward_ms=20.0))
    run.policy = policy
    if behind_plain_steps:
        assert run.steps(3, 4, remaining=1)[-1].budget.is_plain
    for num_drafts in (1, 2):
        assert not run.steps(1, 4)[0].budget.is_plain
        policy.plan(decode_state(run.step, 4))
        corrected = policy.chosen.choice.goodput / policy.chosen.models_say
        # the forward takes twice as long as profiled
        assert (corrected < 0.96) == (num_drafts > behind_plain_steps)


# --- pure, and corrected by what it sees


def mirrored(first: Cadence, second: Cadence) -> Callable[..., object]:
    """Ask both policies everything; they must answer alike."""

    def ask(name: str, *arguments: object) -> object:
        one, two = getattr(first, name)(*arguments), getattr(second, name)(*arguments)
        np.testing.assert_equal(one, two)
        return one

    return ask


class Twins:
    """Two instances behind one policy's face."""

    def __init__(self, profile: Profile) -> None:
        self._ask = mirrored(make_policy(profile), make_policy(profile))

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *arguments: self._ask(name, *arguments)


@pytest.mark.parametrize("truth", [0.0, 0.5, 0.8])
def test_equal_records_and_scores_give_equal_decisions(truth: float) -> None:
    run = run_of(0.8, KNEE, truth=truth, trees=(TREE,))
    run.policy = Twins(hand_profile(0.8, KNEE, trees=(TREE,)))  # type: ignore[assignment]
    records: list[StepRecord] = []
    for batch in (8, 7, 4, 1, 8):
        records += run.steps(25, batch, context=100 + len(records))
        run.weight_version += 1
    assert len({record.budget.reason for record in records}) > 3


def test_the_reason_names_batch_shape_and_expected_goodput() -> None:
    policy = make_policy(hand_profile(0.8, KNEE))
    reasons = [policy.plan(decode_state(8 * n, batch)).reason for n, batch in enumerate((1, 4, 32))]
    assert len(set(reasons)) == 3
    for batch, reason in zip((1, 4, 32), reasons, strict=True):
        assert f"B={batch}" in reason
    assert "1x1" in reasons[0] and "tokens/s expected" in reasons[0]


def test_a_tree_is_chosen_where_its_yield_is_higher_and_a_chain_where_not() -> None:
    wide = replace(TREE, curve=tuple(np.minimum(2.2 * np.array(TREE.curve), np.arange(9)).tolist()))
    policy = make_policy(hand_profile(0.5, CHEAP, trees=(wide,)))
    budget = policy.plan(decode_state())
    assert (budget.branching, budget.width, budget.depth) == (2, 2, 4)
    assert make_policy(hand_profile(0.5, CHEAP, trees=(USELESS_TREE,))).plan(decode_state()).branching == 1


def test_overestimated_acceptance_is_corrected_within_800_steps() -> None:
    wanted = goodput(run_of(0.65, CHEAP).steps(300, 4))
    run = run_of(0.9, CHEAP, truth=0.65)
    run.steps(800, 4)
    records = run.steps(300, 4)
    assert goodput(records) > 0.75 * wanted


def test_expected_goodput_is_within_ten_percent_of_measured_goodput() -> None:
    run = run_of(0.8, CHEAP)
    run.steps(100, 8)
    records = run.steps(200, 8)
    said = [float(r.budget.reason.split("nodes, ")[1].split(" tokens/s")[0]) for r in records]
    assert np.mean(said) == pytest.approx(goodput(records), rel=0.1)


@pytest.mark.parametrize("max_nodes", [1, 2, 4])
def test_no_chain_is_deeper_than_what_can_be_verified(max_nodes: int) -> None:
    policy = make_policy(hand_profile(0.95, cost=CHEAP), max_nodes=max_nodes, max_depth=16)
    plans = [policy.plan(decode_state(step, batch)) for step, batch in enumerate((1, 2, 4, 8, 16))]
    assert max(plan.depth for plan in plans) == max_nodes


def test_trees_deeper_than_the_limit_are_not_chosen() -> None:
    shallow = ShapeTable(
        (
            YieldCurve(branching=1, width=1, levels=8, curve=(0.0, 0.1, *[0.1] * 7)),
            YieldCurve(branching=2, width=2, levels=2, curve=(0.0, 0.2, *[0.3] * 7)),
            YieldCurve(branching=2, width=2, levels=6, curve=(0.0, 0.9, *[6.0] * 7)),
        ),
        max_depth=4,
    )
    views = {
        width: BatchCosts(hand_cost(), num_samples=1, width=width, max_nodes=8, max_levels=4).at(50)
        for width in shallow.widths
    }
    path = np.array([0.1, 0.01, 0.001, 0.0001])
    assert shallow.best(views, path, TrackRecord()).levels in (0, 1, 2)
