"""The draft cache holds what a dense forward over the committed tokens would: tokens cannot show it.

Before every draft the cache is compared with a plain forward of the draft model over the committed tokens
(`checked_drafter`). Drafters with a bug emit the same tokens and fail this check.
"""

from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
import torch
from checked_drafter import CheckedDrafter, checked

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.decoding.draft_tree import DraftTree
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.decoding.verify import Verdict
from rlhfspec.engine.drafters.model_drafter import MAX_CATCH_UP_TOKENS, ModelDrafter
from rlhfspec.engine.engine import Engine
from rlhfspec.policies.drafting.baselines import FixedPolicy

TOLERANCE = 1e-4
CHAIN = FixedPolicy(num_nodes=4, depth=4, branching=1)
TREE = FixedPolicy(num_nodes=8, depth=4, branching=2)
WIDE = FixedPolicy(num_nodes=16, depth=4, branching=3)


class InTurn:
    """Asks each of its policies in turn; None is a plain decode step."""

    def __init__(self, *policies: FixedPolicy | None) -> None:
        self.max_nodes = max(policy.max_nodes for policy in policies if policy)
        self._policies: Iterator[FixedPolicy | None] = cycle(policies)

    def plan(self, state: DecodeState) -> Budget:
        policy = next(self._policies)
        return policy.plan(state) if policy else PLAIN

    def observe(self, record: StepRecord) -> None:
        pass


SCHEDULES = {
    "chain": (CHAIN,),
    "chain of two": (FixedPolicy(num_nodes=2, depth=2, branching=1),),
    "tree": (TREE,),
    "shallow tree": (FixedPolicy(num_nodes=6, depth=2, branching=2),),
    "wide tree": (WIDE,),
    "chain and tree in turn": (CHAIN, TREE),
    "a few plain steps between": (TREE, None, None, CHAIN, None),
    "many plain steps between": (TREE, *[None] * (MAX_CATCH_UP_TOKENS + 2), CHAIN),
}


@pytest.fixture
def run(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]], pairs
) -> Callable[..., list[float]]:
    """Generate under a schedule; return the errors of the draft cache."""
    # lengths and limits differ, so that slots empty one by one and the last sample moves in
    requests = make_requests(
        (1, 30, 119, 12, 50, 7), [SamplingParams(max_new_tokens=n) for n in (18, 7, 22, 12, 20, 4)]
    )
    plain = make_engine("off").generate(requests)

    def generate(schedule: str, kind: type[CheckedDrafter] = CheckedDrafter) -> list[float]:
        engine, drafter = checked(make_engine("tree16", batch=4), pairs["float32"].draft, kind)
        engine.policy = InTurn(*SCHEDULES[schedule])
        done = engine.generate(requests)
        assert [c.token_ids.tolist() for c in done] == [c.token_ids.tolist() for c in plain]
        return drafter.errors

    return generate


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_draft_cache_equals_a_dense_forwards(run: Callable[..., list[float]], schedule: str) -> None:
    errors = run(schedule)
    assert max(errors) < TOLERANCE
    assert len(errors) >= 10


def test_the_cache_is_used_and_not_recomputed(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]]
) -> None:
    engine = make_engine("chain4")
    for request in make_requests((100,), SamplingParams(max_new_tokens=20)):
        engine.submit(request)
    engine.step()
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    while engine.has_work:
        (length,) = [100 + count for count in engine.progress().values()]
        # missing at most: the last chain node, never run through the draft model, and the bonus token
        assert length - 2 <= drafter.num_cached_tokens(0) < length
        engine.step()


class LeafTakenForCached(CheckedDrafter):
    """Counts every accepted node, also the last level's, which the draft model never computed."""

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> torch.Tensor:
        super().commit(batch, tree, verdict)
        return verdict.num_accepted


class PathNotMoved(CheckedDrafter):
    """Leaves the accepted path where the tree put it."""

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> torch.Tensor:
        before = self.cache.cells.clone()
        kept = super().commit(batch, tree, verdict)
        self.cache.cells.copy_(before)
        return kept


class SlotNotMoved(CheckedDrafter):
    """Moves the count of cached tokens and not the cache when a sample changes its slot."""

    def move_slot(self, source: int, target: int) -> None:
        self.adopt(target, self.num_cached_tokens(source))


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        (LeafTakenForCached, "chain of two"),
        (LeafTakenForCached, "shallow tree"),
        (PathNotMoved, "tree"),
        (SlotNotMoved, "chain"),
    ],
)
def test_a_wrong_draft_cache_is_found_though_no_token_changes(
    run: Callable[..., list[float]], kind: type[CheckedDrafter], schedule: str
) -> None:
    assert max(run(schedule, kind)) > 100 * TOLERANCE


def test_plain_steps_are_caught_up_before_the_next_draft(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]], pairs
) -> None:
    engine, drafter = checked(make_engine("chain4"), pairs["float32"].draft)
    engine.policy = InTurn(CHAIN, None, None, None)
    for request in make_requests((100,), SamplingParams(max_new_tokens=30)):
        engine.submit(request)
    lengths = []
    while engine.has_work:
        engine.step()
        lengths.append((engine.num_context_tokens, drafter.num_cached_tokens(0)))
    # three plain steps leave their tokens missing, the draft behind them leaves two at most
    missing = [length - cached for length, cached in lengths[:-1]]
    assert missing[3::4] and min(missing[3::4]) >= 4
    assert max(missing[::4]) <= 2
    assert max(drafter.errors) < TOLERANCE


def test_an_exported_cache_serves_another_slot(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]]
) -> None:
    engine = make_engine("tree8")
    for request in make_requests((40,), SamplingParams(max_new_tokens=30)):
        engine.submit(request)
    engine.step()
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    num_tokens = drafter.num_cached_tokens(0)
    exported = drafter.cache.range_of(0, 0, num_tokens).clone()
    drafter.cache.range_of(3, 0, num_tokens).copy_(exported)
    drafter.adopt(3, num_tokens)
    assert drafter.num_cached_tokens(3) == num_tokens > 0
    assert drafter.cache.range_of(3, 0, num_tokens).equal(exported)


def test_a_wide_tree_stays_inside_the_cache(pairs, make_requests) -> None:
    """14 columns of a tree of 8 nodes; one sample near the end of its cache, one far from its own end."""
    sampling = [SamplingParams(max_new_tokens=45), SamplingParams(max_new_tokens=5)]
    requests = make_requests([10, 50], sampling)
    pair = pairs["float32"]

    def tokens(speculation: SpeculationConfig) -> list[list[int]]:
        engine = build_engine(
            pair.target,
            pair.draft,
            engine=EngineConfig(device="cpu", max_running_samples=2, probe=False),
            speculation=speculation,
            max_total_tokens=55,
        )
        return [completion.token_ids.tolist() for completion in engine.generate(requests)]

    wide = SpeculationConfig(policy="fixed", num_nodes=8, depth=8, branching=2)
    assert tokens(wide) == tokens(SpeculationConfig(policy="off"))


@pytest.mark.parametrize("branching", [1, 2])
def test_a_lookup_chain_is_no_deeper_than_asked(pairs, make_requests, branching: int) -> None:
    requests = make_requests([20, 12], SamplingParams(max_new_tokens=30))

    def tokens(speculation: SpeculationConfig) -> list[list[int]]:
        engine = build_engine(
            pairs["float32"].target,
            None,
            engine=EngineConfig(device="cpu", max_running_samples=2, probe=False),
            speculation=speculation,
            max_total_tokens=64,
        )
        return [completion.token_ids.tolist() for completion in engine.generate(requests)]

    looked_up = SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=8, depth=4, branching=branching)
    assert tokens(looked_up) == tokens(SpeculationConfig(policy="off"))
