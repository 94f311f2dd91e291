"""Updates over trees: losses and gradients of single sequences, the sampler's bits, and what is odd in a batch."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from engine_scored import learner_of, sampled, scorer_of, target
from jaxtyping import config
from tiny_llama import tiny_llama
from trees import doubled, gradients, prefixes, random_tree

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.errors import NumericsError
from rlhfspec.core.records import Rollout, SamplingParams
from rlhfspec.core.settings.algorithm import ALGORITHMS
from rlhfspec.learning.training import batching
from rlhfspec.learning.training.batching import PATHS_PER_TOKEN, PackedSequences, num_unique, shared_packs
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.learning_rate import Horizon
from rlhfspec.learning.training.parallel import OneTrainer

NUM_TREES = 100
FIRST_ROOT = 20
"Its prompt, one token, sets a tree apart from all others."


def model(**changes):
    return tiny_llama(initializer_range=0.3, vocab_size=FIRST_ROOT + NUM_TREES, **changes)


def new_learner(kind="grpo", **trainer) -> Learner:
    return doubled(
        Learner(
            model(),
            algorithm=AlgorithmConfig(kind=kind, entropy_coef=0.01),
            trainer=TrainerConfig(**trainer),
            temperature=0.7,
            seed=5,
            pad_token_id=0,
            horizon=Horizon(max_new_tokens=64),
        )
    )


def share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence is its own branch from here on."""
    nothing = lambda sequences: (list(range(len(sequences))), [0] * len(sequences))  # noqa: E731
    monkeypatch.setattr(batching, "neighbours", nothing)


def require_equal(
    rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch, kind="grpo", **trainer
) -> list[int]:
    """Losses and gradients over trees are those over rows; how many tokens the trees took, and the rows."""
    found, _, num_tokens = gradients(new_learner(kind, **trainer), rollouts, monkeypatch)
    with monkeypatch.context() as without:
        share_nothing(without)
        expected, _, num_of_rows = gradients(new_learner(kind, **trainer), rollouts, monkeypatch)
    assert num_tokens <= num_of_rows
    assert len(found) == len(expected) and any(one.any() for one in found)
    for got, one in zip(found, expected, strict=True):
        torch.testing.assert_close(got, one, rtol=0, atol=1e-10)
    return [num_tokens, num_of_rows]


@pytest.fixture(scope="module", autouse=True)
def _without_shape_checks() -> Iterator[None]:
    """They take most of the time here, and tests of single trees make them."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def forest(rollout_maker: Callable[..., list[Rollout]]) -> list[Rollout]:
    """A group of samples for each of the trees."""
    pairs, groups = [], []
    for seed in range(NUM_TREES):
        for sequence in random_tree(seed):
            pairs.append((np.array([FIRST_ROOT + seed]), sequence))
            groups.append(seed)
    rollouts = rollout_maker(
        model().eval(), len(pairs), temperature=0.7, pairs=pairs, reward=lambda ids: float(ids.sum() % 5)
    )
    for rollout, group in zip(rollouts, groups, strict=True):
        object.__setattr__(rollout.completion, "group_id", group)
    return rollouts


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ALGORITHMS if kind != "distill"])
def test_losses_and_gradients_of_random_trees_are_those_of_their_rows(kind, forest, monkeypatch):
    num_tokens, num_of_rows = require_equal(forest, monkeypatch, kind, minibatch_size=64, block_samples=64)
    assert num_tokens < 0.7 * num_of_rows


@pytest.mark.slow
def test_3000_log_probabilities_over_trees_are_the_samplers_to_the_bit(monkeypatch):
    """16 answers to each of four prompts, drafted by trees; the update computes each prompt once."""
    published = target()
    rollouts = sampled(published, sampling=SamplingParams(max_new_tokens=48), batch=16, samples_per_prompt=16)
    experience = collate(rollouts, pad_token_id=0)
    equal = scorer_of(published).logprobs(experience) == experience.sampler_logprobs
    assert int(equal[experience.mask].sum()) == experience.num_tokens >= 3000
    learner = learner_of(published, scorer_of(published), minibatch_size=16)
    _, report, num_tokens = gradients(learner, rollouts, monkeypatch)
    metrics = report.metrics
    assert metrics["mismatch/bit_equal_share"] == metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert num_tokens < 0.6 * sum(experience.lengths)


ODD = {
    "a row longer than a pack": [[3, 4, 5] * 9, [3, 4, 5, 6], [3, 4, 5] * 8],
    "a group of one": [[3, 4, 5]],
    "rows that differ from the first token": [[3, 4], [4, 5], [5, 3, 4], [6]],
    "equal rows": [[3, 4, 5]] * 4,
    "rows that each extend the last": [list(range(2, 3 + i)) for i in range(12)],
    "three levels of turns": [[3, *a, *b, *c] for a in ([4], [5]) for b in ([6], [7]) for c in ([8, 9], [2])],
}


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
@pytest.mark.parametrize("rows", ODD.values(), ids=ODD)
def test_whatever_a_batch_is_made_of_it_learns_as_its_rows_do(rows, kind, make_rollouts, monkeypatch):
    rollouts = make_rollouts(
        model().eval(),
        len(rows),
        temperature=0.7,
        group_size=len(rows),
        pairs=[(np.array([20]), np.array(row)) for row in rows],
        reward=lambda ids: float(ids.sum() % 5),
    )
    num_tokens, _ = require_equal(rollouts, monkeypatch, kind, max_tokens_per_forward=16)
    num_unique_tokens = 1 + len(prefixes([np.array(row) for row in rows]))
    if kind == "grpo" and num_unique_tokens <= 16:
        assert num_tokens == num_unique_tokens


def test_an_empty_response_is_refused_by_its_sample(make_rollouts):
    rollouts = make_rollouts(model().eval(), 2, pairs=[(np.array([20]), np.array([3]))] * 2)
    completion = rollouts[1].completion
    for name in ("token_ids", "policy_logprobs", "sampling_logprobs"):
        object.__setattr__(completion, name, getattr(completion, name)[:0])
    with pytest.raises(NumericsError, match=r"sample 1 \(prompt 1\): the response is empty"):
        new_learner().update(rollouts)


def test_a_thousand_rows_that_each_extend_the_last_are_packed_by_what_their_paths_hold():
    rows = [np.arange(1, 2 + length) for length in range(1000)]
    packs = shared_packs([[row] for row in rows], 1000, OneTrainer())
    assert sorted(row for pack in packs for row in pack.rows) == list(range(1000))
    for pack in packs:
        inside = [rows[row] for row in pack.rows]
        assert num_unique(inside) <= 1000
        assert sum(len(row) for row in inside) <= PATHS_PER_TOKEN * 1000
        packed = PackedSequences.of(inside)
        assert len(packed.ids) == len(inside[-1]) == max(len(row) for row in inside)
        assert sum(branch.path_tokens for branch in packed.branches) <= PATHS_PER_TOKEN * 1000
    # as few as hold 500,500 tokens of paths, and the room that is left over in each
    assert len(packs) <= 80
