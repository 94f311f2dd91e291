"""Bodies become samples: keys depend on seed, prompt and number alone, and what is not done is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hermes_chat import HERMES, NAMED, WEATHER
from word_chat import PLAIN, word_chat

from rlhfspec.benchmarks.support.malformed import malformed
from rlhfspec.cluster.serving.api_error import ApiError
from rlhfspec.cluster.serving.engine_requests import Asked, RequestReader, usual_sampling
from rlhfspec.cluster.serving.request_bodies import ChatBody, CompletionBody, read_body
from rlhfspec.core.errors import ModelError
from rlhfspec.core.surfaces.surface import surface
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
        (
            {"prompt": "1", "repetition_penalty": 1.1},
            400,
            "repetition_penalty",
            "has 'repetition_penalty': expected none or 1, got 1.1; this engine",
        ),
        ({"prompt": "1", "logprobs": 21}, 400, "logprobs", "less than or equal to 20, got 21"),
        ({"prompt": "1", "top_logprobs": 3}, 400, "top_logprobs", "send logprobs with that number"),
        ({"prompt": "1", "max_tokens": 0}, 400, "max_tokens", "at least 1, or beside echo 0, got 0"),
        ({"prompt": "1", "prompt_logprobs": 1}, 400, "prompt_logprobs", "send echo and logprobs"),
        ({"prompt": "1", "max_tokens": 64}, 400, "prompt", "do not fit 64 tokens"),
        ({"prompt": "1", "model": "gpt"}, 404, "model", "served is 'tiny'"),
        ({"prompt": "1", "temperatur": 1}, 400, "temperatur", "did you mean 'temperature'?"),
        ({"prompt": "1", "stream_options": {"usage": True}}, 400, "stream_options.usage", "include_usage"),
        ({"prompt": "1", "response_format": {"type": "json_object"}}, 400, "response_format.type", "guided"),
        ({"prompt": "1", "response_format": "json_object"}, 400, "response_format", "json_object"),
        ({"prompt": "1", "response_format": {}}, 400, "response_format.type", "required"),
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


@pytest.mark.parametrize(
    ("more", "of_body", "of_request"),
    [
        ({"logprobs": 0}, None, None),
        ({"logprobs": 2}, 2, None),
        ({"echo": True}, None, None),
        ({"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}, 1, None),
        ({"echo": True, "max_tokens": 0}, 0, 0),
    ],
    ids=["sampled", "likeliest", "echo", "lm-eval", "prompt alone"],
)
def test_what_is_scored_is_what_logprobs_and_echo_ask_for(
    reader: RequestReader, more: dict[str, Any], of_body: int | None, of_request: int | None
):
    found = asked(reader, prompt=["12"], **more)
    (one,) = found.requests
    assert (found.body.num_top, one.num_top) == (of_body, of_request)
    assert one.prompt.text == ("12" if "echo" in more else "")


def test_a_tokenizer_without_a_chat_template_is_told(reader: RequestReader):
    body = read_body(b'{"messages": [{"role": "user", "content": "1"}]}', ChatBody)
    with pytest.raises(ApiError, match="no chat template; ask /v1/completions"):
        reader.read(body)


CHAT = PLAIN.replace("{% for", "{{ tone }}{{ tools or '' }}{% for", 1)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "id": "c", "function": {"name": "weather", "arguments": "{}"}}


def chatting(tmp_path: Path, template: str = CHAT, **settings: Any) -> Callable[..., Asked]:
    """What reads bodies of a conversation by a template, `hi` unless they say otherwise."""
    (tmp_path / "config.json").write_text("{}")
    reader = RequestReader(
        word_chat(template), model=str(tmp_path), served_name="m", **({"max_total_tokens": 64} | settings)
    )
    plain = {"messages": [{"role": "user", "content": "hi"}]}
    return lambda **body: reader.read(read_body(json.dumps(plain | body).encode(), ChatBody))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [TOOL]}, "tools", "got neither; send tool_choice 'none', or serve it"),
        ({"tool_choice": "required"}, "tool_choice", "expected none, auto or {'type': 'function'"),
        (
            {"tools": [TOOL], "tool_choice": NAMED | {"type": "x"}},
            "tool_choice",
            "expected none, auto, required or",
        ),
        ({"tools": [TOOL | {"function": {"name": "f"}}], "tool_choice": NAMED}, "tool_choice", "got {"),
        ({"chat_template_kwargs": {"tonne": "kind"}}, "chat_template_kwargs.tonne", "did you mean 'tone'?"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "the body's own key"),
        (
            {"messages": [{"role": "user", "content": "hi", "weight": 0}]},
            "messages.0.weight",
            "nothing here reads",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "messages are text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "hi", "tool_calls": [CALL]}]},
            "messages",
            "does not write the tool_calls of message 0",
        ),
        ({"top_logprobs": 5}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"echo": True}, "echo", "send the whole text to /v1/completions"),
        ({"max_tokens": 4, "reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
    ],
)
def test_what_a_chat_would_lose_is_refused_by_its_path(
    tmp_path: Path, body: dict[str, Any], param: str, words: str
):
    with pytest.raises(ApiError) as refused:
        chatting(tmp_path)(**body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("choice", "template", "forced"),
    [
        ("auto", HERMES, ""),
        ("required", HERMES, '<tool_call>\n{"name":'),
        (NAMED, HERMES, '<tool_call>\n{"name": "weather", "arguments":'),
        ("required", HERMES.replace('{"name": "{{ c.function.name', "<function={{ c.function.name"), None),
        ("required", HERMES.replace("<tool_call>", "") + "{# <tool_call> #}", None),
        (NAMED, HERMES.replace("<assistant>{% endif", "<assistant><think>{% endif"), None),
    ],
    ids=["auto", "required", "named", "written otherwise than read", "no mark", "reasoning first"],
)
def test_a_call_that_must_come_begins_as_the_template_writes_it(
    tmp_path: Path, choice: Any, template: str, forced: str | None
):
    read = chatting(tmp_path, template.replace("<end>", " <end>"), max_total_tokens=512)
    ask = partial(read, tools=[WEATHER], tool_choice=choice)
    if forced is None:
        with pytest.raises(ApiError, match=r"writes no call right behind its prompt .* send 'auto'"):
            ask()
        return
    found = ask()
    assert found.parser is not None and found.forced == forced
    prompt = found.requests[0].prompt
    assert prompt.text.endswith("<assistant>") and len(prompt.token_ids) >= len(
        (prompt.text + forced).split()
    )


def test_a_seed_of_minus_one_is_none_as_in_vllm(tmp_path: Path):
    ask = chatting(tmp_path)
    assert ask(seed=-1).seed != ask(seed=-1).seed and ask(seed=-2).seed == -2


@pytest.mark.parametrize(
    "body",
    [
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
        },
        {"messages": [{"role": "user", "content": "hi", "type": "text"}], "max_tokens": 8, "seed": 1234},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "repetition_penalty": 1.0,
        },
        {
            "parallel_tool_calls": True,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "user": "me",
            "tools": None,
        },
        {"logprobs": True, "top_logprobs": 0, "min_p": 0.0, "top_k": 0, "chat_template_kwargs": {}},
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": "you",
                    "refusal": None,
                    "annotations": [],
                    "tool_calls": None,
                },
                {"role": "user", "content": "who"},
            ]
        },
    ],
    ids=["guidellm", "lm-eval", "vllm bench", "langchain", "trl", "openai's own answer"],
)
def test_what_clients_send_is_taken(tmp_path: Path, body: dict[str, Any]):
    (one,) = chatting(tmp_path)(**body).requests
    assert one.sampling.max_new_tokens == body.get("max_completion_tokens", body.get("max_tokens")) or (
        one.sampling.max_new_tokens == 64 - len(one.prompt.token_ids)
    )


def test_what_the_template_leaves_out_is_refused(tmp_path: Path):
    deaf = chatting(tmp_path, PLAIN.replace("{% for m in messages %}", "{% for m in messages[-1:] %}"))
    with pytest.raises(ApiError, match=r"does not write what the system says \(message 0\)"):
        deaf(messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])
    with pytest.raises(ApiError, match="does not write the tools"):
        deaf(tools=[TOOL], tool_choice="none")


def test_what_the_template_reads_reaches_it(tmp_path: Path):
    read = chatting(tmp_path)

    def length(**body: Any) -> int:
        return len(read(**body).requests[0].prompt.token_ids)

    assert length(tools=[TOOL], tool_choice="none") > length()
    assert length(chat_template_kwargs={"tone": "be kind "}) > length() == length(tool_choice="auto")


def test_a_generation_config_gives_what_bodies_leave_out(tmp_path: Path):
    said = {"temperature": 0.5, "top_k": 7, "min_p": 0.1, "max_new_tokens": 9, "repetition_penalty": 1.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    read = chatting(tmp_path, usual=usual_sampling(str(tmp_path)))
    sampling = read().requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (0.5, 7, 9)
    assert (sampling.min_p, read(min_p=0.0).requests[0].sampling.min_p) == (0.1, 0.0)
    assert read(max_tokens=12, temperature=0).requests[0].sampling.max_new_tokens == 12
    assert usual_sampling(str(tmp_path), "vllm") == {}


def test_a_generation_config_that_vllm_would_follow_and_we_cannot_is_refused(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1}))
    with pytest.raises(ModelError, match=r"has 'repetition_penalty': .* --generation-config vllm"):
        usual_sampling(str(tmp_path))


def test_every_field_of_a_body_is_in_its_table():
    for form, name in ((CompletionBody, "request.completion"), (ChatBody, "request.chat")):
        known = surface(name)
        assert set(form.model_fields) <= {*known.used, *known.only}
        assert {*known.used} - set(form.model_fields) == set()


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
