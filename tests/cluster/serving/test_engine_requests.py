"""Bodies become samples: keys depend on seed, prompt and number alone, and what is not done is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.support.malformed import malformed
from rlhfspec.cluster.serving.api_error import ApiError
from rlhfspec.cluster.serving.engine_requests import Asked, RequestReader
from rlhfspec.cluster.serving.request_bodies import ChatBody, CompletionBody, read_body
from rlhfspec.engine.weights.loading import load_tokenizer
from tests.conftest import TinyPair


@pytest.fixture
def reader(tiny_pair: TinyPair) -> RequestReader:
    return RequestReader(
        load_tokenizer(str(tiny_pair.target)),
        model=str(tiny_pair.target),
        served_name="tiny",
        max_total_tokens=64,
    )


def asked(reader: RequestReader, **body: Any) -> Asked:
    return reader.read(read_body(json.dumps(body).encode(), CompletionBody))


def test_a_key_is_of_seed_prompt_and_number_whoever_is_asked_beside_it(reader: RequestReader):
    alone = [one.key for one in asked(reader, prompt="12", n=2, seed=7).requests]
    beside = [one.key for one in asked(reader, prompt=["3", "12", "12"], n=2, seed=7).requests]
    assert beside[2:4] == alone and len(set(beside)) == 6
    assert alone != [one.key for one in asked(reader, prompt="12", n=2, seed=8).requests]
    assert asked(reader, prompt="12").seed != asked(reader, prompt="12").seed


def test_what_vllm_sends_as_its_defaults_is_taken(reader: RequestReader):
    defaults = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "top_k": -1,
        "echo": False,
        "suffix": None,
        "user": "me",
    }
    (one,) = asked(reader, prompt=[[3, 4]], logprobs=0, model="tiny", best_of=1, **defaults).requests
    assert one.prompt.token_ids.tolist() == [3, 4] and one.sampling.top_k == 0
    assert one.sampling.max_new_tokens == 16 and one.sampling.stop_token_ids
    (endless,) = asked(reader, prompt=[3], ignore_eos=True).requests
    assert endless.sampling.stop_token_ids == ()


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"prompt": "1", "min_p": 0.1}, 400, "min_p", "this engine does not do min_p: expected none or 0"),
        ({"prompt": "1", "logprobs": 3}, 400, "logprobs", "should be 0"),
        ({"prompt": "1", "max_tokens": 64}, 400, "prompt", "do not fit 64 tokens"),
        ({"prompt": "1", "model": "gpt"}, 404, "model", "served is 'tiny'"),
        ({"prompt": "1", "temperatur": 1}, 400, "temperatur", "unknown key 'temperatur'"),
        ({"prompt": [10_000]}, 400, "prompt", "got 10000"),
    ],
)
def test_a_refusal_names_the_key(
    reader: RequestReader, body: dict[str, Any], status: int, param: str, words: str
):
    with pytest.raises(ApiError) as refused:
        asked(reader, **body)
    assert (refused.value.status, refused.value.param) == (status, param)
    assert words in str(refused.value)


def test_a_tokenizer_without_a_chat_template_is_told(reader: RequestReader):
    body = read_body(b'{"messages": [{"role": "user", "content": "1"}]}', ChatBody)
    with pytest.raises(ApiError, match="no chat template; ask /v1/completions"):
        reader.read(body)


def test_malformed_bodies_raise_nothing_else(reader: RequestReader):
    for route, raw in malformed(1000, seed=2, vocab_size=261, context_tokens=64, max_open=64):
        form = CompletionBody if route == "completions" else ChatBody
        try:
            taken = reader.read(read_body(raw, form))
        except ApiError as error:
            assert error.status in (400, 404) and str(error)
        else:
            # one with too many responses: the server's limit
            assert len(taken.requests) == 65
