"""Tokens and log-probabilities are a function of weights, prompt and key: of nothing else, to the last bit."""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rlhfspec.core.records import Completion, FinishReason, SampleRequest, SamplingParams
from rlhfspec.engine.decoding.noise import gumbel_noise, key_words
from rlhfspec.engine.engine import Engine

PROMPT_LENGTHS = (3, 119, 17, 127, 60, 100, 1)
"several responses cross position 128, where a reduction chunk ends"
SAMPLINGS = {
    "T=1": SamplingParams(max_new_tokens=14),
    "top-p 0.9": SamplingParams(top_p=0.9, max_new_tokens=14),
    "T=0": SamplingParams(temperature=0.0, max_new_tokens=14),
    "T=0.7 top-k 5": SamplingParams(temperature=0.7, top_k=5, max_new_tokens=14),
    "min-p 0.2 top-p 0.9": SamplingParams(min_p=0.2, top_p=0.9, max_new_tokens=14),
}
Make = Callable[..., Engine]
MakeRequests = Callable[..., list[SampleRequest]]


@pytest.fixture(scope="module")
def plain(make_engine: Make, make_requests: MakeRequests) -> Callable[[str, str], list[Completion]]:
    """Plain decoding, all samples in one batch: what every other way must equal."""

    @functools.cache
    def completions(dtype: str, sampling: str) -> list[Completion]:
        requests = make_requests(PROMPT_LENGTHS, SAMPLINGS[sampling])
        return make_engine("off", dtype=dtype, batch=8).generate(requests)

    return completions


def assert_equal(ours: list[Completion], theirs: list[Completion]) -> None:
    """Tokens and both log-probabilities, bitwise."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.key == b.key
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.policy_logprobs.tobytes() == b.policy_logprobs.tobytes()
        assert a.sampling_logprobs.tobytes() == b.sampling_logprobs.tobytes()
        assert a.finish_reason == b.finish_reason


def in_order(requests: list[SampleRequest], order: str) -> list[SampleRequest]:
    if order == "shuffled":
        return [requests[i] for i in np.random.default_rng(1).permutation(len(requests))]
    return requests[::-1] if order == "reversed" else requests


CASES = [
    *[
        ("float32", sampling, plan, batch, order)
        for sampling in ("T=1", "top-p 0.9")
        for plan, batch, order in [
            ("chain4", 8, "given"),
            ("tree8", 3, "reversed"),
            ("tree16", 8, "shuffled"),
            ("suffix", 8, "reversed"),
            ("head chain", 8, "shuffled"),
            ("head tree", 3, "reversed"),
            ("model pair", 8, "given"),
            ("head pair", 3, "shuffled"),
            ("bandit", 8, "reversed"),
        ]
    ],
    *[
        ("float32", "T=0", plan, 8, "shuffled")
        for plan in ("chain4", "tree16", "suffix", "head tree", "model pair")
    ],
    *[("float32", "T=0.7 top-k 5", plan, 8, "reversed") for plan in ("tree8", "bandit", "head chain")],
    ("float32", "T=1", "off", 1, "reversed"),
    ("float32", "T=1", "tree16", 1, "given"),
    *[
        ("bfloat16", "T=1", plan, batch, "shuffled")
        for plan, batch in [
            ("chain4", 3),
            ("tree8", 8),
            ("tree16", 3),
            ("suffix", 8),
            ("bandit", 8),
            ("head tree", 3),
            ("head pair", 8),
        ]
    ],
    ("bfloat16", "top-p 0.9", "tree16", 8, "reversed"),
    ("bfloat16", "T=1", "off", 1, "given"),
]


@pytest.mark.parametrize(("dtype", "sampling", "plan", "batch", "order"), CASES)
def test_samples_do_not_depend_on_plan_batch_or_order(
    plain, make_engine: Make, make_requests: MakeRequests, dtype, sampling, plan, batch, order
) -> None:
    requests = make_requests(PROMPT_LENGTHS, SAMPLINGS[sampling])
    engine = make_engine(plan, dtype=dtype, batch=batch)
    done = engine.generate(in_order(requests, order))
    by_key = {completion.key: completion for completion in done}
    assert_equal([by_key[request.key] for request in requests], plain(dtype, sampling))
    if plan != "off":
        assert engine.stats.num_draft_tokens > 50
    if plan not in ("off", "suffix", "head chain", "bandit"):
        assert engine.stats.num_accepted_tokens > 10, "nothing accepted: the case proves nothing"
    if plan in ("tree8", "tree16") and sampling != "T=0":
        assert engine.stats.num_accepted_rank2_plus > 0


def test_lookup_drafts_are_accepted_somewhere(make_engine: Make, make_requests: MakeRequests) -> None:
    requests = make_requests((40, 60), SamplingParams(temperature=0.0, max_new_tokens=40))
    engine = make_engine("suffix")
    done = engine.generate(requests)
    assert engine.stats.num_accepted_tokens > 0
    assert_equal(done, make_engine("off").generate(requests))


def test_responses_differ_between_samples_of_one_prompt(
    make_engine: Make, make_requests: MakeRequests
) -> None:
    requests = make_requests((5, 5), SAMPLINGS["T=1"])
    twins = [replace(request, prompt=requests[0].prompt) for request in requests]
    first, second = make_engine("tree8").generate(twins)
    assert first.token_ids.tolist() != second.token_ids.tolist()


def test_mixed_samplings_share_a_batch(make_engine: Make, make_requests: MakeRequests, plain) -> None:
    names = [*SAMPLINGS, *SAMPLINGS][: len(PROMPT_LENGTHS)]
    requests = make_requests(PROMPT_LENGTHS, [SAMPLINGS[name] for name in names])
    done = make_engine("tree16", batch=8).generate(requests)
    assert_equal(done, [plain("float32", name)[i] for i, name in enumerate(names)])


@pytest.mark.parametrize("plan", ["off", "chain4", "tree16"])
def test_a_limit_cuts_the_same_response_shorter(
    make_engine: Make, make_requests: MakeRequests, plain, plan
) -> None:
    limits = [1, 2, 3, 5, 8, 13, 14]
    samplings = [SamplingParams(max_new_tokens=limit) for limit in limits]
    done = make_engine(plan).generate(make_requests(PROMPT_LENGTHS, samplings))
    for limit, ours, whole in zip(limits, done, plain("float32", "T=1"), strict=True):
        assert ours.token_ids.tolist() == whole.token_ids[:limit].tolist()
        assert ours.policy_logprobs.tobytes() == whole.policy_logprobs[:limit].tobytes()
        assert ours.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("plan", ["off", "chain4", "tree16"])
def test_a_stop_token_ends_the_response_and_belongs_to_it(
    make_engine: Make, make_requests: MakeRequests, plain, plan
) -> None:
    wholes = plain("float32", "T=1")
    # a token from the middle of each response, so that speculation overshoots it
    stops = [(int(whole.token_ids[3 + i]), int(whole.token_ids[12])) for i, whole in enumerate(wholes)]
    samplings = [SamplingParams(max_new_tokens=14, stop_token_ids=stop) for stop in stops]
    done = make_engine(plan).generate(make_requests(PROMPT_LENGTHS, samplings))
    for stop, ours, whole in zip(stops, done, wholes, strict=True):
        end = int(np.isin(whole.token_ids, stop).argmax()) + 1
        assert ours.token_ids.tolist() == whole.token_ids[:end].tolist()
        assert ours.sampling_logprobs.tobytes() == whole.sampling_logprobs[:end].tobytes()
        assert ours.finish_reason == FinishReason.STOP


def test_a_stop_token_at_the_limit_counts_as_a_stop(
    make_engine: Make, make_requests: MakeRequests, plain
) -> None:
    last = [int(whole.token_ids[-1]) for whole in plain("float32", "T=1")]
    samplings = [SamplingParams(max_new_tokens=14, stop_token_ids=(token,)) for token in last]
    done = make_engine("tree8").generate(make_requests(PROMPT_LENGTHS, samplings))
    assert {completion.finish_reason for completion in done} == {FinishReason.STOP}


def filtered_logprobs(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Log-probabilities after top-k, then top-p, as the text says, token by token."""
    order = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(scores[order] - scores.max())
    order, weights = np.array(order)[weights >= params.min_p], weights[weights >= params.min_p]
    probs, mass, kept = weights / weights.sum(), 0.0, []
    for token, prob in zip(order, probs, strict=True):
        if kept and mass >= params.top_p:
            break
        kept.append(token)
        mass += prob
    out = np.full(len(scores), -np.inf)
    out[kept] = scores[kept] - scores.max() - np.log(np.exp(scores[kept] - scores.max()).sum())
    return out


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_plain_forward_gives_the_same_tokens_by_the_rule(
    make_engine: Make, make_requests: MakeRequests, pairs, dense_logits, sampling
) -> None:
    """Teacher-forced: one Hugging Face forward over prompt and response, the rule applied at each position."""
    params = SAMPLINGS[sampling]
    requests = make_requests(PROMPT_LENGTHS, params)
    done = make_engine("tree16").generate(requests)
    near_ties = 0
    for request, completion in zip(requests, done, strict=True):
        prompt, response = request.prompt.token_ids, completion.token_ids
        logits = dense_logits(pairs["float32"].target, np.concatenate([prompt, response]))
        rows = logits[len(prompt) - 1 : -1].double().numpy() / (params.temperature or 1.0)
        words = key_words(request.key, request.prompt.token_ids)[None]
        positions = np.arange(len(prompt), len(prompt) + len(response))[None]
        noise = gumbel_noise(words, positions, rows.shape[1])[0].numpy()
        for j, (scores, token) in enumerate(zip(rows, response, strict=True)):
            after = filtered_logprobs(scores, params) if params.temperature else scores
            perturbed = after + (noise[j] if params.temperature else 0.0)
            if perturbed.argmax() != token:
                near_ties += 1
                assert perturbed.max() - perturbed[token] < 1e-4 / (params.temperature or 1.0)
            unfiltered = filtered_logprobs(scores, SamplingParams())[token]
            assert completion.policy_logprobs[j] == pytest.approx(unfiltered, abs=1e-4)
            expected = after[token] if params.temperature else 0.0
            assert completion.sampling_logprobs[j] == pytest.approx(expected, abs=1e-4)
    assert near_ties <= 1
