"""The draft cache holds what a dense forward over the committed tokens would: tokens cannot show it.

Before it drafts, the drafter computes the logits behind every root from its cache. Each time, they are compared
with a plain forward of the draft model over all committed tokens. Planted bugs leave every token as it was
and fail this check.
"""

from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np
import pytest
from torch import Tensor

from core.config import EngineConfig, SpeculationConfig
from core.records import PLAIN, Budget, DecodeState, SampleRequest, SamplingParams, StepRecord
from engine.build import build_engine
from engine.drafters.model_drafter import MAX_CATCH_UP_TOKENS, ModelDrafter
from engine.engine import Engine
from policies.drafting.baselines.fixed import FixedPolicy

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
    make_engine: Callable[..., Engine],
    make_requests: Callable[..., list[SampleRequest]],
    dense_logits: Callable[..., Tensor],
) -> Callable[..., tuple[float, int]]:
    """Generate under a schedule; return the largest error of the draft logits and how many were compared."""
    # lengths and limits differ, so that slots empty one by one and the last sample moves in
    requests = make_requests(
        (1, 30, 119, 12, 50, 7), [SamplingParams(max_new_tokens=n) for n in (18, 7, 22, 12, 20, 4)]
    )
    plain = make_engine("off").generate(requests)

    def generate(
        schedule: str, plant: Callable[[ModelDrafter], None] | None = None, batch: int = 4
    ) -> tuple[float, int]:
        engine = make_engine("tree16", batch=batch)
        engine.policy = InTurn(*SCHEDULES[schedule])
        drafter = engine.drafter
        assert isinstance(drafter, ModelDrafter)
        if plant:
            plant(drafter)
        errors: list[float] = []
        catch_up = drafter._catch_up

        def checked(running):
            logits = catch_up(running)
            for slot in range(len(running)):
                tokens: np.ndarray = running.tokens[slot, : running.lengths[slot]]
                dense = dense_logits(drafter.model, tokens)[-1]
                errors.append((logits[slot] - dense).abs().max().item())
            return logits

        drafter._catch_up = checked  # type: ignore[method-assign]
        done = engine.generate(requests)
        assert [c.token_ids.tolist() for c in done] == [c.token_ids.tolist() for c in plain]
        return max(errors), len(errors)

    return generate


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_draft_logits_equal_a_dense_forward(run, schedule: str) -> None:
    error, compared = run(schedule)
    assert error < TOLERANCE
    assert compared >= 10


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


def _leaf_taken_for_cached(drafter: ModelDrafter) -> None:
    """Counts every accepted node, also the last level's, which the draft model never computed."""
    commit = drafter.commit

    def wrong(batch, tree, verdict):
        commit(batch, tree, verdict)
        drafter._cached[: len(batch)] = batch.lengths[: len(batch)] + verdict.num_accepted.numpy()

    drafter.commit = wrong  # type: ignore[method-assign]


def _path_not_moved(drafter: ModelDrafter) -> None:
    """Leaves the accepted path where the tree put it."""
    drafter.runner.pool.move_tokens = lambda slots, sources, targets: None  # type: ignore[method-assign]


def _plain_steps_not_caught_up(drafter: ModelDrafter) -> None:
    """Believes after plain steps that only the root is missing."""
    catch_up = drafter._catch_up

    def wrong(batch):
        live = len(batch)
        started = drafter._cached[:live] > 0
        drafter._cached[:live][started] = batch.lengths[:live][started] - 1
        return catch_up(batch)

    drafter._catch_up = wrong  # type: ignore[method-assign]


def _slot_not_moved(drafter: ModelDrafter) -> None:
    """Moves the count of cached tokens and not the cache when a sample changes its slot."""

    def wrong(source: int, target: int) -> None:
        drafter._cached[target] = drafter._cached[source]

    drafter.move_slot = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("plant", "schedule"),
    [
        (_leaf_taken_for_cached, "chain of two"),
        (_leaf_taken_for_cached, "shallow tree"),
        (_path_not_moved, "tree"),
        (_plain_steps_not_caught_up, "a few plain steps between"),
        (_slot_not_moved, "chain"),
    ],
)
def test_the_check_catches_planted_bugs(run, plant: Callable[[ModelDrafter], None], schedule: str) -> None:
    error, _ = run(schedule, plant)
    assert error > 100 * TOLERANCE


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

    looked_up = SpeculationConfig(
        policy="fixed", drafter="ngram", num_nodes=8, depth=4, branching=branching, ngram_max=2, ngram_min=1
    )
    assert tokens(looked_up) == tokens(SpeculationConfig(policy="off"))
