"""A profile measured on a live engine: finite, true to what the target says, and nothing left behind."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hand_profile import hand_provenance

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.calibration import cost_sweep
from rlhfspec.engine.calibration.cost_sweep import _DrawnPlans, sweep_costs
from rlhfspec.engine.calibration.draft_recorder import RecordingScorer
from rlhfspec.engine.calibration.profiler import (
    MAX_PROFILED_NODES,
    PRIOR,
    SHAPES,
    MadeProfile,
    Placeholder,
    make_profile,
    record_drafts,
)
from rlhfspec.engine.decoding.draft_tree import DraftTree
from rlhfspec.engine.decoding.verify import Verdict
from rlhfspec.engine.drafters.refinement import Scorer
from rlhfspec.engine.engine import Engine
from rlhfspec.policies.drafting.look_up_or_draft import AdaptiveDrafting

LENGTHS = (9, 20, 30, 14, 8, 40)
SAMPLING = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def engine(pairs: dict) -> Engine:
    pair = pairs["float32"]
    return build_engine(
        pair.target,
        pair.draft,
        engine=EngineConfig(device="cpu", max_running_samples=4, max_prefill_tokens=96, probe=False),
        speculation=SpeculationConfig(policy="goodput"),
        max_total_tokens=112,
        policy=Placeholder(MAX_PROFILED_NODES),
    )


@pytest.fixture(scope="module")
def requests(make_requests: Callable[..., list[SampleRequest]]) -> list[SampleRequest]:
    return make_requests(LENGTHS, SAMPLING)


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Engine], requests: list[SampleRequest]) -> list[Completion]:
    """Responses longer than what is drafted beyond the last token of `requests`."""
    longer = [replace(r, sampling=replace(SAMPLING, max_new_tokens=60)) for r in requests]
    return make_engine("off").generate(longer)


@pytest.fixture(scope="module")
def made(engine: Engine, requests: list[SampleRequest]) -> MadeProfile:
    return make_profile(engine, requests, hand_provenance(), budget_s=1.0)


def test_models_curves_and_costs_are_finite_and_positive(made: MadeProfile) -> None:
    profile = made.profile
    assert np.isfinite([*profile.acceptance.first, *profile.acceptance.other]).all()
    assert np.isfinite(list(profile.quality.values())).all()
    for curve in profile.yields:
        values = np.array(curve.curve)
        assert values[0] == 0.0 and (np.diff(values) >= 0).all() and values[-1] > 0.0
    costs = made.costs
    assert min(costs.draft_s.min(), costs.verify_s.min(), costs.rest_s.min()) > 0.0
    assert len(costs) >= 8
    shape = made.costs.shape
    assert (profile.cost.verify_s(shape) > 0).all() and (profile.cost.rest_s(shape) > 0).all()
    assert profile.max_samples == 4
    assert profile.provenance == hand_provenance()


def test_every_shape_is_recorded_whole_the_chain_first(made: MadeProfile) -> None:
    assert [(d.branching, d.width, int(d.level.max())) for d in made.drafts] == list(SHAPES)
    assert (made.profile.yields[0].branching, made.profile.yields[0].levels) == (1, SHAPES[0][2])
    for draft in made.drafts:
        assert len(draft) > 0
        assert draft.accepted.shape == draft.margin.shape == draft.parent.shape
        assert np.isfinite(draft.margin).all() and (draft.margin >= 0).all() and (draft.logprob <= 0).all()
        # no node is accepted below one that is not, and siblings never both
        assert not (draft.accepted & ~draft.reached).any()
        for level in range(1, int(draft.level.max()) + 1):
            assert (draft.accepted[:, draft.level == level].sum(1) <= 1).all()


def test_the_engine_is_left_as_it_was_found(made: MadeProfile, engine: Engine) -> None:
    assert isinstance(engine.policy, Placeholder)
    assert engine.scorer is None
    assert not engine.has_work


def test_a_failure_leaves_the_engine_as_it_was_found(engine: Engine, requests: list[SampleRequest]) -> None:
    def failing(what: str, share: float) -> None:
        if "costs" in what:
            raise KeyboardInterrupt

    policy, scorer = engine.policy, engine.scorer
    with pytest.raises(KeyboardInterrupt):
        make_profile(engine, requests, hand_provenance(), budget_s=0.1, progress=failing)
    assert (engine.policy, engine.scorer, engine.has_work) == (policy, scorer, False)


@pytest.mark.parametrize(("branching", "width", "levels"), SHAPES)
def test_recorded_outcomes_are_what_plain_decoding_emits(
    engine: Engine,
    requests: list[SampleRequest],
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    branching: int,
    width: int,
    levels: int,
) -> None:
    """A node is accepted where its path's tokens are those that the response goes on with."""
    tokens = {completion.key: completion.token_ids.tolist() for completion in plain}
    expected: list[list[bool]] = []
    concluded = RecordingScorer.concluded

    def spy(self, tree: DraftTree, verdict: Verdict, batch: Sequence[SampleRequest]) -> None:
        before, so_far = self.num_drafts, engine.progress()
        concluded(self, tree, verdict, batch)
        if self.num_drafts == before:
            return
        ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
        for row, request in enumerate(batch):
            rest = tokens[request.key][so_far[request.key] :]
            path: list[list[int]] = [[]]
            for node, parent in zip(ids[row], parents[row], strict=True):
                path.append([*path[parent], node])
            expected.append([rest[: len(p)] == p for p in path[1:]])

    monkeypatch.setattr(RecordingScorer, "concluded", spy)
    policy, scorer = engine.policy, engine.scorer
    drafts = record_drafts(engine, requests, branching, width, levels, budget_s=30.0)
    engine.policy, engine.scorer = policy, scorer
    assert drafts.accepted.tolist() == expected
    assert drafts.accepted.sum() > 10


def test_drafting_by_the_profile_changes_no_token(
    made: MadeProfile, engine: Engine, requests: list[SampleRequest], plain: list[Completion]
) -> None:
    # a draft is free and a forward costs the same for any: whatever was measured on a busy machine, drafting pays
    measured = made.profile.cost
    draft, rest = (0.0,) * len(measured.draft), (0.0,) * len(measured.rest)
    cost = replace(measured, draft=draft, verify=(0.01,) + (0.0,) * (len(measured.verify) - 1), rest=rest)
    profile = replace(made.profile, cost=cost)
    placeholder, scorer, engine.step_log = engine.policy, engine.scorer, []
    engine.policy = AdaptiveDrafting(profile, max_nodes=16, max_depth=12)
    engine.scorer = Scorer(profile.acceptance)
    ours = engine.generate(requests)
    engine.policy, engine.scorer = placeholder, scorer
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids[:40].tolist()
        assert mine.policy_logprobs.tobytes() == theirs.policy_logprobs[:40].tobytes()
    records, engine.step_log = engine.step_log, None
    assert sum(record.num_accepted_tokens for record in records) > 0


@pytest.mark.parametrize("kv_cache_mb", [0.2, 0.6])
def test_costs_are_swept_for_the_batches_that_have_room(pairs, requests, kv_cache_mb: float) -> None:
    """Samples that are never let in together would be waited for without end."""
    pair = pairs["float32"]
    engine = build_engine(
        pair.target,
        pair.draft,
        engine=EngineConfig(device="cpu", max_running_samples=8, probe=False, kv_cache_mb=kv_cache_mb),
        speculation=SpeculationConfig(policy="goodput"),
        max_total_tokens=100,
        policy=Placeholder(MAX_PROFILED_NODES),
    )
    made = make_profile(engine, requests, hand_provenance(), budget_s=0.5)
    most = made.costs.shape.num_samples.max()
    assert 1 <= most <= engine.exchange.kv_admission.num_of(int(0.2 * 100)) < 8
    assert most > 1 or kv_cache_mb < 0.6


def test_a_sweep_whose_every_step_ends_a_sample_comes_to_an_end(pairs, requests, monkeypatch) -> None:
    """A draft model that is always right, and few tokens to go: a plan of sixteen levels ends them at once."""
    pair = pairs["float32"]
    engine = build_engine(
        pair.target,
        copy.deepcopy(pair.target),
        engine=EngineConfig(device="cpu", max_running_samples=2, probe=False),
        speculation=SpeculationConfig(policy="goodput"),
        max_total_tokens=24,
        policy=Placeholder(MAX_PROFILED_NODES),
    )
    monkeypatch.setattr(_DrawnPlans, "_SHARES", (0.0, 1.0, 0.0, 0.0))
    monkeypatch.setattr(_DrawnPlans, "_DEPTHS", ((16,), (2,), (2,)))
    costs = sweep_costs(engine, requests, np.random.default_rng(0), budget_s=0.1)
    assert len(costs) >= 4 and costs.shape.num_samples.max() == 2


def test_a_slow_batch_is_timed_plainly_and_with_a_node_each_before_time_runs_out(
    engine: Engine, requests: list[SampleRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between these two a law chooses most; what is larger than any law would choose takes the time of others."""
    monkeypatch.setattr(cost_sweep, "SLOW_POINT_S", 0.0)
    monkeypatch.setattr(engine, "scorer", Scorer(PRIOR))
    shape = sweep_costs(engine, requests, np.random.default_rng(0), budget_s=0.0).shape
    for size, first in ((1, 0), (4, 4)):
        assert shape.num_samples[first : first + 4].tolist() == [size] * 4
        assert shape.num_nodes[first : first + 2].tolist() == [0, size]
        assert shape.levels[first : first + 2].tolist() == [0, 1]
        assert shape.widest[first + 2 : first + 4].max() <= 4
