"""Bad requests are refused before they touch the engine; logits that are not finite end their sample alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import ConfigError, DataError, NotFiniteError
from rlhfspec.core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams
from rlhfspec.core.sample_state import SampleState
from rlhfspec.engine.build import build_engine

BROKEN_TOKEN = 63
"Its row of the embedding is not finite."


def request_of(index: int, ids: Any, **sampling: Any) -> SampleRequest:
    return SampleRequest(
        key=SampleKey(run_seed=4, sample_index=index),
        prompt=Prompt(prompt_id=70 + index, token_ids=ids),
        sampling=SamplingParams(**{"max_new_tokens": 12} | sampling),
    )


def bits(completion: Completion) -> tuple[bytes, bytes]:
    return completion.token_ids.tobytes(), completion.policy_logprobs.tobytes()


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            {"temperature": -1.0},
            r"sampling\.temperature must be 0 \(greedy\) or a number from .* got -1\.0",
        ),
        ({"temperature": float("nan")}, r"temperature .* got nan"),
        ({"temperature": float("inf")}, "temperature .* got inf"),
        ({"temperature": 10**400}, "temperature .* got 1000"),
        ({"top_p": 0.0}, r"sampling\.top_p must be a number above 0 and at most 1, got 0\.0"),
        ({"top_p": float("nan")}, "top_p .* got nan"),
        ({"top_k": -1}, "top_k .* got -1"),
        ({"top_k": 2**70}, "top_k must be an integer of at least 0, of 63 bits"),
        ({"temperature": 1e-40}, "temperature .* got 1e-40"),
        ({"temperature": None}, "temperature .* got None"),
        ({"stop_token_ids": 5}, "stop_token_ids .* got 5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens .* got 2.5"),
        ({"stop_token_ids": (2, -1)}, "stop_token_ids must be token ids of at least 0"),
        ({"stop_token_ids": (True,)}, "stop_token_ids must be token ids of at least 0"),
    ],
)
def test_sampling_parameters_outside_their_range_are_refused(sampling: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**sampling)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([3, 64]), "prompt 70: expected token ids from 0 to 63, the model's vocabulary, got 64"),
        (np.array([-1, 3]), "got -1"),
        (np.array([[1, 2]]), "one row of integers"),
        (np.array([1.0, 2.0]), "one row of integers"),
        (np.array([], dtype=np.int64), "at least one"),
        (np.zeros(190, dtype=np.int64), "do not fit 192 tokens"),
    ],
)
def test_prompts_that_the_model_cannot_read_are_refused(make_engine, ids: np.ndarray, message: str) -> None:
    engine = make_engine("tree8")
    with pytest.raises(DataError, match=message):
        engine.generate([request_of(1, np.array([4, 5])), request_of(0, ids)])
    assert not engine.has_work


def test_stop_tokens_outside_the_vocabulary_are_refused(make_engine) -> None:
    with pytest.raises(DataError, match=r"expected stop token ids from 0 to 63, .* got 64"):
        make_engine("off").generate([request_of(0, np.array([4, 5]), stop_token_ids=(2, 64))])


def test_two_samples_of_one_key_are_refused_and_leave_nothing(make_engine) -> None:
    engine = make_engine("off")
    twice = [request_of(3, np.array([4, 5])), request_of(3, np.array([6]))]
    with pytest.raises(DataError, match="2 requests have the key of sample 3"):
        engine.generate(twice)
    engine.submit(twice[0])
    with pytest.raises(DataError, match="2 requests have the key of sample 3"):
        engine.generate(twice[1:])
    assert engine.num_waiting == 1


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("run_seed", 2**64, "run_seed from 0"),
        ("run_seed", -1, "run_seed from 0"),
        ("run_seed", 1.5, "run_seed from 0"),
        ("run_seed", True, "run_seed from 0"),
        ("sample_index", 2**64, "sample_index from 0"),
        ("sample_index", [1], "sample_index from 0"),
        ("stream", "evil", "stream of rlhfspec.core.records.Stream"),
    ],
)
def test_keys_that_the_noise_does_not_tell_apart_are_refused(make_engine, part, value, message) -> None:
    engine, request = make_engine("off"), request_of(3, np.array([4, 5]))
    bad = replace(request, key=replace(request.key, **{part: value}))
    for asked in (lambda: engine.generate([bad]), lambda: engine.submit(bad)):
        with pytest.raises(DataError, match=message):
            asked()
    assert not engine.has_work


def test_numpy_integers_are_keys_and_an_iterator_is_a_batch(make_engine) -> None:
    requests = [request_of(index, np.array([4, 5])) for index in range(2)]
    expected = make_engine("off").generate(requests)
    keys = [replace(r.key, run_seed=np.int64(4), sample_index=np.int8(i)) for i, r in enumerate(requests)]
    got = make_engine("off").generate(replace(r, key=key) for r, key in zip(requests, keys, strict=True))
    assert [bits(c) for c in got] == [bits(c) for c in expected]


def test_one_key_with_two_prompts_gives_two_samples(make_engine) -> None:
    """Apart, where nobody can refuse them: they must not share their noise."""
    engine = make_engine("off")
    first, second = (
        engine.generate([request_of(3, np.array(ids), max_new_tokens=60)])[0] for ids in ([4, 5], [6, 5])
    )
    assert np.mean(first.token_ids == second.token_ids) < 0.2


@pytest.mark.parametrize("plan", ["off", "chain4", "tree16", "suffix"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_their_sample_and_no_other(
    pairs, new_model, make_engine, plan: str, value: float
) -> None:
    pair = pairs["float32"]
    requests = [request_of(index, np.arange(3 + index)) for index in range(4)]
    expected = [bits(c) for c in make_engine(plan, batch=2).generate(requests)]
    broken = request_of(9, np.array([1, BROKEN_TOKEN, 2]))
    engine = make_engine(plan, batch=2, pair=pair)
    embedding = pair.target.get_input_embeddings().weight
    before = embedding.data[BROKEN_TOKEN].clone()
    try:
        _set_embedding(engine, pairs, BROKEN_TOKEN, value)
        for each in (requests[0], broken, *requests[1:]):
            engine.submit(each)
        done, messages = {}, []
        while engine.has_work:
            try:
                done.update((c.key, c) for c in engine.step())
            except NotFiniteError as error:
                messages.append(str(error))
    finally:
        embedding.data[BROKEN_TOKEN] = before
    assert len(messages) == 1
    assert "logits are not finite with weight version 0" in messages[0]
    assert "sample 9 (prompt 79, seed 4) at response token 0, behind token id 2" in messages[0]
    unharmed = [r for r in requests if BROKEN_TOKEN not in done[r.key].token_ids[:-1]]
    assert len(unharmed) >= 2
    for request in unharmed:
        assert bits(done[request.key]) == expected[request.key.sample_index]


def _set_embedding(engine, pairs, token: int, value: float) -> None:
    """In what the engine has laid out of the target."""
    tensors = {name: tensor.clone() for name, tensor in pairs["float32"].target.state_dict().items()}
    tensors["model.embed_tokens.weight"][token] = value
    engine.runner.load(tensors)


def test_generate_says_which_sample_failed_and_leaves_nothing(pairs, make_engine) -> None:
    engine = make_engine("tree8", batch=2)
    embedding = pairs["float32"].target.get_input_embeddings().weight
    before = embedding.data[BROKEN_TOKEN].clone()
    requests = [request_of(index, np.array([1, index, BROKEN_TOKEN, 5])) for index in range(4)]
    try:
        _set_embedding(engine, pairs, BROKEN_TOKEN, float("nan"))
        with pytest.raises(NotFiniteError, match=r"sample 0 .*sample 1 "):
            engine.generate(requests)
        assert not engine.has_work
    finally:
        embedding.data[BROKEN_TOKEN] = before
        _set_embedding(engine, pairs, BROKEN_TOKEN, 0.0)
        embedding.data[BROKEN_TOKEN] = before


@pytest.mark.parametrize("plan", ["chain4", "tree16"])
def test_a_draft_model_that_is_not_finite_changes_no_token(pairs, new_model, make_engine, plan: str) -> None:
    pair = pairs["float32"]
    requests = [request_of(index, np.array([1, index, 7])) for index in range(4)]
    expected = [bits(c) for c in make_engine("off").generate(requests)]
    engine = make_engine(plan)
    embedding = pair.draft.get_input_embeddings().weight
    before = embedding.data.clone()
    try:
        embedding.data[1:40] = float("nan")
        engine.drafter.runner.load(dict(pair.draft.state_dict()))
        assert [bits(c) for c in engine.generate(requests)] == expected
    finally:
        embedding.data[:] = before


def test_finite_logits_of_minus_infinity_elsewhere_are_no_failure(make_engine) -> None:
    """A model may rule tokens out; only a row without any finite entry is broken."""
    engine = make_engine("off")
    plain = engine.runner.logits
    ruled_out = torch.zeros(64)
    ruled_out[10:] = float("-inf")
    engine.runner.logits = lambda *arguments: plain(*arguments) + ruled_out
    done = engine.generate([request_of(0, np.array([4, 5]))])[0]
    assert done.token_ids.max() < 10
    assert np.isfinite(done.policy_logprobs).all()


def test_a_top_p_that_rounds_to_nothing_keeps_the_best_token(make_engine) -> None:
    engine = make_engine("off")
    best, nearly = (
        engine.generate([request_of(index, np.array([4, 5]), **sampling)])[0]
        for index, sampling in enumerate(({"temperature": 0.0}, {"top_p": 1e-60}))
    )
    assert nearly.token_ids.tolist() == best.token_ids.tolist()
    assert np.isfinite(nearly.sampling_logprobs).all()


@pytest.mark.parametrize("plan", ["off", "chain4", "tree8"])
def test_what_is_cut_behind_a_stop_token_breaks_no_sample(pairs, make_engine, plan: str) -> None:
    """The stop token's own embedding is not finite: nothing behind it is ever committed."""
    pair = pairs["float32"]
    requests = [request_of(i, np.array([1, i, 5]), stop_token_ids=(BROKEN_TOKEN,)) for i in range(12)]
    expected = [bits(c) for c in make_engine("off").generate(requests)]
    assert any(np.frombuffer(tokens, dtype=np.int64)[-1] == BROKEN_TOKEN for tokens, _ in expected)
    engine = make_engine(plan)
    embedding = pair.target.get_input_embeddings().weight
    before = embedding.data[BROKEN_TOKEN].clone()
    try:
        _set_embedding(engine, pairs, BROKEN_TOKEN, float("nan"))
        assert [bits(c) for c in engine.generate(requests)] == expected
    finally:
        embedding.data[BROKEN_TOKEN] = before


def test_narrow_numbers_of_numpy_do_not_wrap(make_engine) -> None:
    """127 and 80 added up in eight bits would be a negative length."""
    request = request_of(
        0, np.arange(80) % 60, max_new_tokens=np.int8(100), stop_token_ids=iter([np.uint8(3)])
    )
    assert request.sampling == SamplingParams(max_new_tokens=100, stop_token_ids=(3,))
    completion = make_engine("off").generate([request])[0]
    assert 1 <= len(completion.token_ids) <= 100


def test_samples_submitted_before_a_batch_are_returned_by_the_next_step(make_engine) -> None:
    engine, (first, second) = make_engine("off"), [request_of(index, np.array([4, 5])) for index in range(2)]
    expected = [bits(c) for c in make_engine("off").generate([first, second])]
    engine.submit(first)
    assert [bits(c) for c in engine.generate([second])] == expected[1:]
    assert engine.has_work
    assert [bits(c) for c in engine.step()] == expected[:1]
    assert not engine.has_work


@pytest.mark.parametrize(
    ("tokens", "logprobs", "message"),
    [
        ([4, 99], 2, "as many log-probabilities as tokens"),
        ([4, -1], 2, "as many log-probabilities as tokens"),
        ([4, 5, 6], 2, "as many log-probabilities as tokens"),
        ([4, 5, 6, 7], 4, "a whole response"),
        ([4, 3], 2, "a whole response"),
    ],
)
def test_a_response_that_cannot_go_on_is_refused(make_engine, tokens, logprobs, message) -> None:
    engine = make_engine("off")
    request = request_of(0, np.array([4, 5]), max_new_tokens=4, stop_token_ids=(3,))
    zeros = np.zeros(logprobs, dtype=np.float32)
    state = replace(SampleState.fresh(request), token_ids=np.array(tokens))
    with pytest.raises(DataError, match=message):
        engine.resume(replace(state, policy_logprobs=zeros, sampling_logprobs=zeros))
    assert not engine.has_work


@pytest.mark.parametrize("vocab_size", [0, -1, 65, 10**6])
def test_a_vocabulary_that_the_target_does_not_have_is_refused(pairs, vocab_size: int) -> None:
    with pytest.raises(ConfigError, match="expected a vocab_size from 1 to 64"):
        build_engine(
            pairs["float32"].target,
            None,
            engine=EngineConfig(),
            speculation=SpeculationConfig(policy="off"),
            max_total_tokens=64,
            vocab_size=vocab_size,
        )
