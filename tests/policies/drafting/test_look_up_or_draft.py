"""Computed drafts and look-ups on paper: each sample takes what promises it more, and neither spoils the other."""

from dataclasses import replace

import numpy as np
from hand_profile import PaperDrafter, decode_state, goodput, hand_cost, hand_profile

from rlhfspec.core.decode_records import DraftLog, LookUpLog, StepRecord
from rlhfspec.policies.drafting.draft_policy import DraftPolicy, Proposal
from rlhfspec.policies.drafting.look_up_or_draft import AdaptiveDrafting
from rlhfspec.policies.drafting.replay import replay
from rlhfspec.profiles.cost import CostModel, Shape

COST = hand_cost(forward_ms=10.0, token_ms=0.1, level_ms=1.0)
"A node costs a hundredth of a forward, a level a tenth."
MS = 1e-3
NOTHING = np.zeros((4, 0), dtype=np.float32)


def policy_of(acceptance: float, cost: CostModel = COST) -> AdaptiveDrafting:
    return AdaptiveDrafting(hand_profile(acceptance, cost), max_nodes=8, max_depth=8, looks_up=True)


def planned(policy: AdaptiveDrafting, batch: int, step: int = 0) -> AdaptiveDrafting:
    assert policy.plan(decode_state(step, batch)).look_up == 8
    return policy


def paths(*conditional: float, levels: int = 8) -> np.ndarray:
    """Path scores of chains, a row for each."""
    return (np.array(conditional)[:, None] ** np.arange(1.0, levels + 1)).astype(np.float32)


def offered(chains: np.ndarray) -> Proposal:
    return Proposal(chains, (1,) * chains.shape[1])


class Run:
    """Decode steps on paper. A share of the samples finds something; what is shown of it may be wrong."""

    def __init__(
        self,
        policy: AdaptiveDrafting,
        *,
        head: float,
        found: float,
        shown: float = 0.9,
        truth: float = 0.9,
        look_up_ms: float = 0.02,
        cost: CostModel = COST,
    ) -> None:
        self.policy, self.cost = policy, cost
        self.head, self.found, self.shown, self.truth = head, found, shown, truth
        self.head_shown = 0.0
        self.look_up_s = look_up_ms * MS
        self.random = np.random.default_rng(0)
        self.records: list[StepRecord] = []

    def go(self, num_steps: int, batch: int = 4) -> "Run":
        for _ in range(num_steps):
            record = self._step(batch)
            self.policy.observe(record)
            self.records.append(record)
        return self

    def _step(self, batch: int) -> StepRecord:
        state = decode_state(len(self.records), batch)
        budget = self.policy.plan(state)
        drafter = PaperDrafter(truth=self.head, shown=self.head_shown or self.head)
        draft: DraftLog | None = None
        if budget.look_up:
            draft = self._pair(budget, batch, drafter)
        elif not budget.is_plain:
            draft = drafter.draft(self.policy, budget, batch, self.random)
        shape = Shape(
            num_samples=float(batch),
            context_tokens=float(state.context_tokens),
            num_nodes=float(draft.num_nodes.sum()) if draft else 0.0,
            widest=float(draft.num_nodes.max()) if draft else 0.0,
            levels=float(len(draft.level_sizes)) if draft else 0.0,
            width=float(budget.width or 1),
        )
        accepted = int(draft.num_accepted.sum()) if draft else 0
        levels_s = float(self.cost.draft_s(shape)) if draft and draft.level_sizes else 0.0
        return StepRecord(
            state=state,
            budget=budget,
            num_draft_tokens=int(draft.num_nodes.sum()) if draft else 0,
            num_accepted_tokens=accepted,
            num_accepted_rank2_plus=0,
            num_emitted_tokens=batch + accepted,
            draft_s=levels_s + (self.look_up_s if budget.look_up else 0.0),
            verify_s=float(self.cost.verify_s(shape)),
            accept_s=float(self.cost.rest_s(shape)),
            other_s=0.0,
            draft=draft,
        )

    def _pair(self, budget, batch: int, drafter: PaperDrafter) -> DraftLog:
        has = self.random.random(batch) < self.found
        looked = np.zeros((batch, 0), dtype=np.float32)
        if has.any():
            looked = has[:, None].astype(np.float32) * paths(self.shown, levels=budget.look_up)
        either = _Either(self.policy, looked)
        if self.policy.is_enough(offered(looked)):
            counts = either.select(np.zeros((batch, 0), dtype=np.float32), ())
            draft = DraftLog(
                scores=np.zeros((batch, 0), dtype=np.float32),
                level_sizes=(),
                num_nodes=counts,
                num_accepted=np.zeros(batch, dtype=np.int64),
            )
        else:
            draft = drafter.draft(either, budget, batch, self.random)
        right = (self.random.random((batch, 8)) < self.truth).cumprod(axis=1).sum(axis=1)
        accepted = np.where(either.used, np.minimum(right, draft.num_nodes), draft.num_accepted)
        log = LookUpLog(scores=looked, used=either.used, seconds=self.look_up_s)
        return replace(draft, num_accepted=accepted, look_up=log)

    def shares(self, last: int) -> tuple[float, float]:
        """Of the last steps: of how many samples look-ups were verified, and in how many steps nothing was computed."""
        records = self.records[-last:]
        logs = [r.draft for r in records if r.draft is not None and r.draft.look_up is not None]
        used = sum(float(log.look_up.used.mean()) for log in logs if log.look_up is not None)
        return used / last, sum(not log.level_sizes for log in logs) / last


class _Either:
    """The pair as a paper drafter asks it."""

    max_nodes = 8

    def __init__(self, policy: AdaptiveDrafting, looked: np.ndarray) -> None:
        self.policy, self.looked = policy, looked
        self.used = np.zeros(len(looked), dtype=bool)
        self.plan, self.deepen, self.observe = policy.plan, policy.deepen, policy.observe

    def select(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        proposals = [offered(self.looked), *([Proposal(scores, level_sizes)] if level_sizes else [])]
        counts = self.policy.choose(proposals)
        self.used = counts[0] > 0
        return sum(counts)


def plain_rate(batch: int, cost: CostModel = COST) -> float:
    none = dict.fromkeys(("num_nodes", "widest", "levels"), 0.0)
    shape = Shape(num_samples=float(batch), context_tokens=100.0 * batch, width=1.0, **none)
    return batch / float(cost.verify_s(shape) + cost.rest_s(shape))


def test_a_likely_look_up_alone_spares_the_computing_drafter() -> None:
    policy = planned(policy_of(0.6), batch=1)
    assert isinstance(policy, DraftPolicy)
    assert policy.is_enough(offered(paths(0.95)))
    assert not policy.is_enough(offered(paths(0.4)))
    assert not policy.is_enough(offered(NOTHING[:1]))


def test_in_one_step_each_sample_takes_what_promises_it_more() -> None:
    policy = planned(policy_of(0.6), batch=4)
    looked = paths(0.95, 0.2, 0.3, 0.0)
    assert not policy.is_enough(offered(looked)), "three samples are better off with a computed draft"
    computed = paths(0.6, 0.6, 0.9, 0.6, levels=4)
    looked_up, computed = policy.choose([offered(looked), offered(computed)])
    used, counts = looked_up > 0, looked_up + computed
    assert used.tolist() == [True, False, False, False]
    assert counts[0] > 4, "a look-up may be longer than what was computed"
    assert 0 < counts[1:].max() <= 4, "nothing stands behind a chain's end"
    assert policy.is_enough(offered(paths(0.95, 0.95, 0.95, 0.95)))


def test_scores_of_the_computing_drafter_count_as_this_run_accepts_them() -> None:
    policy = policy_of(0.8)
    looked, computed = paths(*[0.7] * 4), paths(*[0.75] * 4)
    planned(policy, 4)
    assert not policy.choose([offered(looked), offered(computed)])[0].any()
    # shown 0.8, right 0.55: worse than what is looked up, and far from dead
    run = Run(policy, head=0.55, found=0.0)
    run.head_shown = 0.8
    run.go(60)
    assert not policy.law.suspended
    planned(policy, 4, step=60)
    assert policy.choose([offered(looked), offered(computed)])[0].all()


def test_look_ups_that_fail_are_not_held_against_the_computing_drafter() -> None:
    policy = policy_of(0.8)
    run = Run(policy, head=0.8, found=0.3, shown=0.97, truth=0.0).go(400)
    assert run.shares(400)[0] > 0.01, "some were verified"
    assert not policy.law.suspended and policy.take_alarm() is None
    assert policy.law.chosen.choice.num_nodes > 0


def test_look_ups_that_succeed_do_not_hide_a_dead_drafter() -> None:
    policy = policy_of(0.8)
    run = Run(policy, head=0.8, found=0.5).go(100)
    assert not policy.law.suspended
    run.head = 0.0
    run.go(400)
    assert policy.law.suspended
    used, alone = run.shares(100)
    assert used > 0.3 and alone > 0.8, "look-ups go on"


def test_where_computing_does_not_pay_look_ups_go_by_their_own_law() -> None:
    run = Run(policy_of(0.05), head=0.05, found=0.5).go(300)
    used, alone = run.shares(200)
    assert used > 0.4 and alone > 0.9
    assert goodput(run.records[-200:]) > 1.3 * plain_rate(4)


def test_nothing_found_costs_next_to_nothing() -> None:
    run = Run(policy_of(0.05), head=0.05, found=0.0, look_up_ms=0.1).go(3000)
    assert goodput(run.records) > 0.99 * plain_rate(4)
    found, none = (Run(policy_of(0.7), head=0.7, found=0.0, look_up_ms=ms).go(2000) for ms in (0.0, 0.5))
    assert goodput(none.records) > 0.985 * goodput(found.records)
    assert sum(record.budget.look_up > 0 for record in none.records) < 300, "dear look-ups pause"
    assert sum(record.budget.look_up > 0 for record in found.records) > 1900, "cheap ones do not"


def test_the_pair_is_faster_than_either() -> None:
    computed, pair = (
        goodput(Run(policy_of(0.6), head=0.6, found=found).go(800).records[200:]) for found in (0.0, 0.2)
    )
    looked_up = goodput(Run(policy_of(0.05), head=0.05, found=0.2).go(800).records[200:])
    assert pair > 1.1 * max(computed, looked_up)


def test_look_ups_shown_better_than_they_are_pause() -> None:
    without = goodput(Run(policy_of(0.7), head=0.7, found=0.0).go(1500).records)
    run = Run(policy_of(0.7), head=0.7, found=0.5, shown=0.95, truth=0.2).go(1500)
    assert goodput(run.records) > 0.95 * without


def test_a_log_replays() -> None:
    for acceptance in (0.05, 0.7):
        records = Run(policy_of(acceptance), head=acceptance, found=0.3).go(200).records
        assert replay(policy_of(acceptance), records) is None
        number = next(
            i for i, r in enumerate(records) if r.draft and r.draft.look_up and r.draft.look_up.used.any()
        )
        draft = records[number].draft
        assert draft is not None and draft.look_up is not None
        other = replace(draft, look_up=replace(draft.look_up, used=~draft.look_up.used))
        difference = replay(policy_of(acceptance), [*records[:number], replace(records[number], draft=other)])
        assert difference is not None and difference.what == "used"
