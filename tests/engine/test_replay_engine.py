"""A real engine's step log, written, read and replayed: every decision comes out again, every tampering is found.

Seconds come from a clock that ticks at random but from a seed: what the policies learn is the same in every run.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import Budget, DecodeState, DraftLog, StepRecord
from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.draft_policies import build_policy
from rlhfspec.engine.engine import Engine
from rlhfspec.policies.drafting.baselines import BanditPolicy
from rlhfspec.policies.drafting.cadence import COST_STEPS
from rlhfspec.policies.drafting.draft_policy import DraftLaw, DraftPolicy, Proposal
from rlhfspec.policies.drafting.look_up_or_draft import AdaptiveDrafting
from rlhfspec.policies.drafting.replay import replay
from rlhfspec.profiles.acceptance import AcceptanceModel
from rlhfspec.profiles.cost import CostModel, Shape, draft_terms, rest_terms, verify_terms
from rlhfspec.profiles.profile import Profile, YieldCurve
from rlhfspec.profiles.provenance import Provenance
from rlhfspec.profiles.step_log import PolicyOrigin, encode_step_log, read_step_log

PROMPT_LENGTHS = (3, 119, 17, 60, 1, 30, 8)
SAMPLING = SamplingParams(max_new_tokens=48)
ONE = Shape(num_samples=1.0, context_tokens=1.0, num_nodes=1.0, widest=1.0, levels=1.0, width=1.0)


def coefficients(terms: Callable[[Shape], list], seconds: dict[int, float]) -> tuple[float, ...]:
    """All zero but a few terms."""
    return tuple(seconds.get(term, 0.0) for term in range(len(terms(ONE))))


PROFILE = Profile(
    provenance=Provenance(**{field.name: "by hand" for field in fields(Provenance)}),  # type: ignore[arg-type]
    # a level costs a twentieth of a plain decode step, a verified token a hundredth
    cost=CostModel(
        draft=coefficients(draft_terms, {0: 1e-5, 1: 1e-4, 4: 2e-4, 5: 1e-5}),
        verify=coefficients(verify_terms, {0: 2e-3, 1: 1e-5, 2: 4e-5}),
        rest=coefficients(rest_terms, {0: 1e-3, 3: 1e-4}),
    ),
    acceptance=AcceptanceModel(first=(1.0, 0.7, 0.1, 0.5, -0.2), other=(-0.5, -0.8, 0.4, -0.1, -0.3)),
    yields=(
        YieldCurve(branching=1, width=1, levels=8, curve=(0.0, 0.6, 1.0, 1.25, 1.4, 1.5, 1.56, 1.6, 1.62)),
        YieldCurve(branching=2, width=2, levels=2, curve=(0.0, 0.6, 1.0, 1.2, 1.3, 1.35, 1.38)),
        YieldCurve(branching=3, width=3, levels=3, curve=(0.0, 0.6, 1.0, 1.3, 1.45, 1.55, 1.65, 1.7, 1.75)),
    ),
    max_samples=8,
)


class Ticks:
    """A clock whose every reading is a random while after the last, about half a millisecond."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += float(self._random.exponential(5e-4))
        return self._now


class Erratic(DraftLaw):
    """Draws every answer from one stream: a question more or less than the engine's changes all that follow."""

    max_nodes = 12

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def plan(self, state: DecodeState) -> Budget:
        branching, depth = (int(number) for number in self._random.integers(1, 5, size=2))
        refined = bool(self._random.random() < 0.9)
        return Budget(
            num_nodes=min(4, depth),
            depth=depth,
            branching=branching,
            width=branching,
            reason="drawn",
            refined=refined,
        )

    def deepen(self, level: int, scores: np.ndarray) -> int:
        return int(self._random.choice(3, p=(0.2, 0.5, 0.3)))

    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        most = min(proposals[0].scores.shape[1], self.max_nodes)
        return [self._random.integers(0, most + 1, size=len(proposals[0].scores))]

    def observe(self, record: StepRecord) -> None:
        pass


class Wide(DraftLaw):
    """Wants trees of three columns a level, as deep as the longest response goes."""

    max_nodes = 3

    def plan(self, state: DecodeState) -> Budget:
        depth = max(state.max_remaining_tokens - 1, 1)
        return Budget(num_nodes=3, depth=depth, branching=3, width=3, reason="wide", refined=True)

    def deepen(self, level: int, scores: np.ndarray) -> int:
        return 1

    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        return [np.full(len(one.scores), 3) for one in proposals]

    def observe(self, record: StepRecord) -> None:
        pass


MakePolicy = Callable[[], DraftPolicy]
POLICIES: dict[str, MakePolicy] = {
    "goodput": lambda: AdaptiveDrafting(PROFILE, max_nodes=8, max_depth=8),
    "bandit": lambda: BanditPolicy(max_nodes=8, max_depth=8, window=8),
    "erratic": lambda: Erratic(5),
}


@pytest.fixture(scope="module")
def speculating(pairs, new_model) -> Callable[..., Engine]:
    """Build an engine around a policy; the draft model is nearer to the target than the other tests' one."""
    target, draft = pairs["float32"].target, new_model(1, "float32")
    torch.manual_seed(5)
    for weight in draft.parameters():
        weight.data.add_(torch.randn_like(weight) * weight.data.std().nan_to_num() * 0.06)

    def make(policy: DraftPolicy, *, batch: int = 4, max_total_tokens: int = 192) -> Engine:
        return build_engine(
            target,
            draft,
            engine=EngineConfig(device="cpu", max_running_samples=batch, max_prefill_tokens=96, probe=False),
            speculation=SpeculationConfig(policy="fixed"),
            max_total_tokens=max_total_tokens,
            policy=policy,
            profile=PROFILE,
            clock=Ticks(0),
        )

    return make


@pytest.fixture(scope="module")
def logged(
    speculating: Callable[..., Engine],
    make_requests: Callable[..., list[SampleRequest]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], list[StepRecord]]:
    """A policy's log of three batches, the weights' and the drafter's version changing in between, via the disk."""

    @functools.cache
    def make(name: str) -> list[StepRecord]:
        engine = speculating(POLICIES[name]())
        for round_number in range(3):
            engine.generate(make_requests(PROMPT_LENGTHS, SAMPLING, seed=round_number))
            engine.weight_version += 1
            engine.drafter_version += round_number
        path = tmp_path_factory.mktemp(name) / "steps.parquet"
        path.write_bytes(encode_step_log(engine.step_records, PolicyOrigin(speculation=SpeculationConfig())))
        return read_step_log(path)[0]

    return make


@pytest.mark.parametrize("name", POLICIES)
def test_a_log_on_disk_reproduces_every_decision(
    logged: Callable[[str], list[StepRecord]], name: str
) -> None:
    records = logged(name)
    assert len(records) > 60
    assert replay(POLICIES[name](), records) is None
    if name in ("goodput", "erratic"):
        shapes = {(r.budget.branching, len(r.draft.level_sizes)) for r in records if r.draft is not None}
        assert len(shapes) >= 3
    else:
        assert len({record.budget.num_nodes for record in records}) >= 3


def test_the_log_itself_says_how_to_make_the_policy_again(
    logged: Callable[[str], list[StepRecord]], tmp_path: Path
) -> None:
    made_from = PolicyOrigin(speculation=SpeculationConfig(max_nodes=8, max_depth=8), profile=PROFILE)
    (tmp_path / "steps.parquet").write_bytes(encode_step_log(logged("goodput"), made_from))
    records, origin = read_step_log(tmp_path / "steps.parquet")
    assert origin == made_from
    assert replay(build_policy(origin.speculation, origin.profile), records) is None


def refined_step(records: list[StepRecord], *, after: int = 20) -> int:
    """A decode step, not the first ones, that verified two nodes or more of its first sample and not all."""
    return next(
        i
        for i, record in enumerate(records)
        if i >= after
        and record.draft is not None
        and 2 <= record.draft.num_nodes[0] < record.draft.scores.shape[1]
    )


def test_a_changed_draft_is_found_where_it_happened(logged: Callable[[str], list[StepRecord]]) -> None:
    records = logged("goodput")
    number = refined_step(records)
    draft = records[number].draft
    assert draft is not None
    scores, counts = draft.scores.copy(), draft.num_nodes.copy()
    # the paths of the first sample were never worth a node
    scores[0] = 0.0
    counts[0] -= 1
    changes: dict[str, DraftLog] = {
        "num_nodes": replace(draft, num_nodes=counts),
        "scores": replace(draft, scores=scores),
    }
    for what, changed in changes.items():
        tampered = [*records]
        tampered[number] = replace(records[number], draft=changed)
        difference = replay(POLICIES["goodput"](), tampered)
        assert difference is not None, what
        assert difference.decode_step == records[number].decode_step, what
        assert difference.what in ("num_nodes", "levels"), what


@pytest.mark.parametrize("name", ["goodput", "bandit"])
def test_changed_tokens_or_seconds_are_found_later(
    logged: Callable[[str], list[StepRecord]], name: str
) -> None:
    records = logged(name)
    # costs are observed in it
    number = 3 * COST_STEPS
    for change in ({"num_emitted_tokens": 400}, {"verify_s": 0.5}):
        # a policy may shrug off one odd step, but not many
        tampered = records[:number] + [replace(record, **change) for record in records[number:]]
        difference = replay(POLICIES[name](), tampered)
        assert difference is not None, change
        assert difference.decode_step > number, change


def test_a_removed_record_is_found(logged: Callable[[str], list[StepRecord]]) -> None:
    records = logged("bandit")
    difference = replay(POLICIES["bandit"](), [*records[:30], *records[31:]])
    assert difference is not None
    assert (difference.what, difference.recorded, difference.replayed) == ("decode_step", 31, 30)


def test_trees_cut_short_by_the_cache_replay(
    speculating: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]]
) -> None:
    # 60 tokens, 3 nodes and the root fill two pages of 32: nothing is left over
    engine = speculating(Wide(), max_total_tokens=60)
    engine.generate(make_requests((20, 44, 12), SamplingParams(max_new_tokens=16)))
    engine.generate(make_requests((44,), SamplingParams(max_new_tokens=16)))
    cut = [r for r in engine.step_records if r.draft and len(r.draft.level_sizes) < r.budget.depth]
    assert len(cut) >= 3
    assert replay(Wide(), engine.step_records) is None


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_equal_plain_decoding(
    speculating: Callable[..., Engine],
    make_engine: Callable[..., Engine],
    make_requests: Callable[..., list[SampleRequest]],
    name: str,
    batch: int,
) -> None:
    requests = make_requests(PROMPT_LENGTHS, SAMPLING)
    engine = speculating(POLICIES[name](), batch=batch)
    for ours, theirs in zip(engine.generate(requests), make_engine("off").generate(requests), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.policy_logprobs.tobytes() == theirs.policy_logprobs.tobytes()
        assert ours.sampling_logprobs.tobytes() == theirs.sampling_logprobs.tobytes()
    assert engine.stats.num_accepted_tokens > 20
