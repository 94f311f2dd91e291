"""What a sample's tokens are scored with is what they were sampled with, bit for bit, whoever decodes beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhfspec.core.records import Completion, SampleKey, SampleRequest, SamplingParams
from rlhfspec.core.sample_state import SampleState
from rlhfspec.engine.engine import Engine

FILTERED = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02, max_new_tokens=30)
SAMPLINGS = [FILTERED, SamplingParams(max_new_tokens=30), SamplingParams(temperature=0.0, max_new_tokens=30)]


def to_score(done: Completion, request: SampleRequest, count: int) -> SampleRequest:
    key = SampleKey(run_seed=12, sample_index=request.key.sample_index)
    return replace(request, key=key, history=done.as_history(), num_top=count)


@pytest.mark.parametrize("plan", ["off", "tree16"])
def test_scores_are_the_samplers_bits(
    make_engine: Callable[..., Engine],
    make_requests: Callable[..., list[SampleRequest]],
    dense_logits: Callable,
    pairs,
    plan: str,
) -> None:
    engine = make_engine(plan, batch=2, max_total_tokens=160)
    # the last is scored in several forwards and fills the context
    samplings = [*SAMPLINGS, replace(FILTERED, max_new_tokens=60)]
    requests = make_requests((7, 1, 20, 100), samplings)
    done = engine.generate(requests)
    asked = [to_score(one, request, 5) for one, request in zip(done, requests, strict=True)]
    # beside samples that are decoded
    others = make_requests((9, 12), SAMPLINGS[1], seed=4)
    beside = [replace(one, key=SampleKey(run_seed=13, sample_index=n)) for n, one in enumerate(others)]
    scored = engine.generate([beside[0], *asked, beside[1]])[1:-1]
    for request, one, again in zip(requests, done, scored, strict=True):
        assert again.token_ids.tolist() == one.token_ids.tolist()
        scores, first = again.scores, len(request.prompt.token_ids) - 1
        assert len(scores.logprobs) == first + one.num_tokens
        is_greedy = request.sampling.temperature == 0.0
        own = one.policy_logprobs if is_greedy else one.sampling_logprobs
        assert scores.logprobs[first:].tolist() == own.tolist()
        assert (scores.top_logprobs[:, :-1] >= scores.top_logprobs[:, 1:]).all()
        tokens = np.concatenate([request.prompt.token_ids, one.token_ids])
        dense = torch.log_softmax(dense_logits(pairs["float32"].target, tokens[:-1]), -1)
        prompt = slice(0, first)
        assert np.allclose(scores.logprobs[prompt], dense[np.arange(first), tokens[1 : first + 1]], atol=1e-4)
        assert (scores.top_ids[prompt] == dense[prompt].topk(5).indices.numpy()).all()


def test_one_that_moved_while_it_waited_is_scored_where_it_came(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]]
) -> None:
    engine = make_engine("tree16")
    (request,) = make_requests((30,), SAMPLINGS[1])
    expected = engine.generate([replace(request, num_top=2)])[0].scores
    assert engine.exchange.attach(SampleState.fresh(replace(request, num_top=2)), ()) is None
    (found,) = engine.step()
    assert found.scores.top_logprobs.tolist() == expected.top_logprobs.tolist() and not engine.has_work


def test_a_prompt_is_scored_alone(
    make_engine: Callable[..., Engine], make_requests: Callable[..., list[SampleRequest]]
) -> None:
    engine = make_engine("off")
    requests = [replace(one, num_top=2) for one in make_requests((1, 30), SAMPLINGS[0])]
    one, many = engine.generate(requests)
    assert one.scores.top_ids.shape == (0, 2) and many.scores.top_ids.shape == (29, 2)
    assert many.num_tokens == 0 and engine.stats.num_decode_steps == 0
