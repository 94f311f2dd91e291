"""Refined drafts: whatever depth, shape and unlike numbers of nodes the policy picks, no bit changes.

The policy here answers at random. The draft cache is held to a dense forward as in test_draft_cache.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from checked_drafter import checked

from rlhfspec.core.decode_records import Budget, DecodeState, StepRecord
from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine.attention.packing import RaggedRows
from rlhfspec.engine.decoding.draft_tree import chain, keep
from rlhfspec.engine.decoding.noise import Noise
from rlhfspec.engine.decoding.sampling_rule import RowSampling, leaders
from rlhfspec.engine.drafters.refinement import Scorer
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.policies.drafting.draft_policy import DraftLaw, Proposal
from rlhfspec.profiles.acceptance import AcceptanceModel, first_features, other_features
from tests.helpers.backends import own_backend, torch_backend

MODEL = AcceptanceModel(first=(1.0, 0.7, 0.1, 0.5, -0.2), other=(-0.5, -0.8, 0.4, -0.1, -0.3))
PROMPT_LENGTHS = (3, 119, 17, 127, 60, 100, 1)


class Erratic(DraftLaw):
    """Draws shape, depth and every sample's number of nodes."""

    max_nodes = 12

    def __init__(self, seed: int, *, even: bool = False) -> None:
        self._random = np.random.default_rng(seed)
        self._even = even
        self.records: list[StepRecord] = []

    def plan(self, state: DecodeState) -> Budget:
        branching = int(self._random.integers(1, 4))
        depth = int(self._random.integers(1, 5))
        return Budget(
            num_nodes=12, depth=depth, branching=branching, width=branching, reason="drawn", refined=True
        )

    def deepen(self, level: int, scores: np.ndarray) -> int:
        assert len(scores) and (level > 0 or (scores == 1.0).all())
        return int(self._random.choice(3, p=(0.2, 0.5, 0.3)))

    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        (batch, candidates) = proposals[0].scores.shape
        most = min(candidates, self.max_nodes)
        count = self._random.integers(0, most + 1, size=1 if self._even else batch)
        return [np.broadcast_to(count, batch).copy()]

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


def erratic_engine(
    make_engine: Callable[..., Engine], dtype: str, seed: int, batch: int = 4, backend=None, **kw
) -> Engine:
    engine = make_engine("tree16", dtype=dtype, batch=batch, backend=backend)
    engine.policy = Erratic(seed, **kw)
    engine.scorer = Scorer(MODEL)
    return engine


@pytest.mark.parametrize("backend", [own_backend, torch_backend])
@pytest.mark.parametrize(
    ("dtype", "seed", "sampling"),
    [
        ("float32", 0, SamplingParams(max_new_tokens=24)),
        ("float32", 1, SamplingParams(max_new_tokens=24, top_p=0.9)),
        ("float32", 2, SamplingParams(max_new_tokens=24, temperature=0.0)),
        ("bfloat16", 3, SamplingParams(max_new_tokens=24)),
    ],
)
def test_no_bit_depends_on_what_the_policy_picks(
    make_engine: Callable[..., Engine],
    make_requests: Callable[..., list[SampleRequest]],
    dtype: str,
    seed: int,
    sampling: SamplingParams,
    backend: Callable[[], ComputeBackend],
) -> None:
    requests = make_requests(PROMPT_LENGTHS, sampling)
    plain = make_engine("off", dtype=dtype, backend=backend()).generate(requests)
    engine = erratic_engine(make_engine, dtype, seed, backend=backend())
    for ours, theirs in zip(engine.generate(requests), plain, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.policy_logprobs.tobytes() == theirs.policy_logprobs.tobytes()
        assert ours.sampling_logprobs.tobytes() == theirs.sampling_logprobs.tobytes()
    unlike = [r for r in engine.step_records if r.draft and len(set(r.draft.num_nodes.tolist())) > 1]
    assert len(unlike) >= 5
    assert engine.stats.num_accepted_tokens > 20


def test_the_draft_cache_follows(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]], pairs
) -> None:
    engine, drafter = checked(erratic_engine(make_engine, "float32", 5), pairs["float32"].draft)
    engine.generate(make_requests(PROMPT_LENGTHS, SamplingParams(max_new_tokens=24)))
    assert max(drafter.errors) < 1e-4
    assert len(drafter.errors) > 30


def test_the_log_says_what_was_shown_chosen_and_accepted(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]]
) -> None:
    engine = erratic_engine(make_engine, "float32", 7)
    engine.generate(make_requests(PROMPT_LENGTHS, SamplingParams(max_new_tokens=24)))
    logs = [(record, record.draft) for record in engine.step_records if record.draft is not None]
    assert logs
    for record, draft in logs:
        assert draft.scores.shape == (record.num_samples, sum(draft.level_sizes))
        assert record.num_draft_tokens <= draft.num_nodes.sum()
        assert (draft.num_accepted <= draft.num_nodes).all()
        assert draft.num_accepted.sum() == record.num_accepted_tokens
        assert record.select_s > 0.0


def test_nodes_behind_a_samples_limit_score_nothing(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]]
) -> None:
    engine = erratic_engine(make_engine, "float32", 8)
    engine.generate(
        make_requests((9, 30), [SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=3)])
    )
    first = next(r.draft for r in engine.step_records if r.draft and len(r.draft.level_sizes) >= 3)
    assert engine.step_records[0].num_samples == 2
    ends = np.cumsum(first.level_sizes)
    if first is engine.step_records[0].draft:
        # two tokens and the bonus: the third level cannot count
        assert (first.scores[1, ends[1] :] == 0.0).all()
        assert (first.scores[1, : ends[0]] > 0.0).all()


def test_scores_equal_the_acceptance_model_by_hand() -> None:
    torch.manual_seed(0)
    scaled, noise = torch.randn(2, 3, 11), torch.randn(2, 4, 11)
    perturbed = scaled + noise[:, 1:2]
    sampling = RowSampling.of([SamplingParams(max_new_tokens=4)] * 2, torch.device("cpu"))
    found = leaders(scaled, Noise(noise), torch.ones(2, 3, dtype=torch.int64), sampling, 4)
    ids, score = found.token_ids, Scorer(MODEL).acceptance(found.scores, found.logprobs, levels=(2,))
    logprobs = torch.log_softmax(scaled, -1)
    for b in range(2):
        for w in range(3):
            order = perturbed[b, w].argsort(descending=True)
            assert ids[b, w].tolist() == order[:4].tolist()
            best = perturbed[b, w, order]
            margin = np.array([best[0] - best[1], best[0] - best[1], best[0] - best[2]])
            logprob = logprobs[b, w, order[:3]].numpy()
            expected = MODEL.conditional(margin, logprob, np.full(3, 2.0), np.array([1, 2, 3]))
            np.testing.assert_allclose(score[b, w], expected, rtol=1e-5)


def test_features_have_the_order_the_coefficients_have() -> None:
    one = np.ones(1)
    assert first_features(one * 2, one * -3, one * 4)[0].tolist() == pytest.approx(
        [1.0, np.log(2.001), 2.0, -3.0, np.log(4)]
    )
    assert other_features(one * 2, one * -3, one * 4, one * 5)[0].tolist() == pytest.approx(
        [1.0, 2.0, -3.0, np.log(4), np.log(5)]
    )


def test_unlike_numbers_of_tokens_pack_and_unpack() -> None:
    rows = RaggedRows.of(np.array([3, 1, 2]), torch.device("cpu"))
    grid = torch.arange(9)
    assert rows.pack(grid).tolist() == [0, 1, 2, 3, 6, 7]
    # a missing token is its sample's root
    assert rows.unpack(rows.pack(grid)).tolist() == [0, 1, 2, 3, 3, 3, 6, 7, 6]


def test_a_chain_keeps_heads_and_their_place_in_the_draft_cache() -> None:
    ids = torch.arange(8).view(2, 4)
    whole = chain(ids, torch.ones(2, 4))
    cut = keep(whole, np.array([3, 3]))
    assert cut.token_ids.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert cut.draft_slots.tolist() == [[0, 1, 2]] * 2
    assert cut.num_kept is None
    ragged = keep(whole, np.array([0, 3]))
    assert ragged.token_ids.tolist() == [[-1, -1, -1], [4, 5, 6]]
    assert keep(whole, np.array([0, 0])).num_nodes == 0
