"""A stream's parts join to the whole text, and each decodes what is new alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_chat import save_byte_pair
from hermes_chat import HERMES, NAMED, WEATHER
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhfspec.cluster.serving.engine_answers import AnswerWriter
from rlhfspec.cluster.serving.engine_requests import RequestReader
from rlhfspec.cluster.serving.request_bodies import ChatBody, CompletionBody, read_body
from rlhfspec.core.records import Completion, FinishReason, Scores, as_asked
from rlhfspec.engine.weights.loading import load_tokenizer

CHUNK = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_byte_pair(folder := tmp_path_factory.mktemp("pair"))
    return folder / "target"


class CountingTokenizer:
    """The model's own; it counts the tokens that it decodes."""

    def __init__(self, model: Path) -> None:
        self.tokenizer, self.num_decoded = load_tokenizer(str(model)), 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


def completion_of(writer: AnswerWriter, ids: list[int], reason: FinishReason) -> Completion:
    zeros = np.zeros(len(ids), dtype=np.float32)
    return replace(
        as_asked(writer.asked.requests[0]),
        token_ids=np.array(ids),
        policy_logprobs=zeros,
        sampling_logprobs=zeros,
        finish_reason=reason,
    )


def writer_of(model: Path, name: str = "tiny", **body: Any) -> tuple[AnswerWriter, CountingTokenizer]:
    tokenizer = CountingTokenizer(model)
    reader = RequestReader(tokenizer.tokenizer, model=str(model), served_name="tiny", max_total_tokens=512)
    asked = reader.read(read_body(json.dumps({"prompt": "a"} | body).encode(), CompletionBody))
    return AnswerWriter(asked, tokenizer, name), tokenizer  # type: ignore[arg-type]


def parts_of(writer: AnswerWriter, whole: Completion) -> list[str]:
    """The texts of a stream that is asked for its parts every CHUNK tokens."""
    events = []
    for count in range(CHUNK, whole.num_tokens, CHUNK):
        so_far = completion_of(writer, whole.token_ids[:count].tolist(), FinishReason.CUT)
        events += writer.parts(0, so_far, is_last=False)
    events += writer.parts(0, whole, is_last=True)
    return [json.loads(one.removeprefix("data: "))["choices"][0]["text"] for one in events]


@pytest.mark.parametrize("text", ["naïve 東京 🎉 " * 20, "abcabd" * 30], ids=["wide", "ascii"])
def test_parts_join_to_the_whole_and_no_part_decodes_it_anew(model: Path, text: str):
    writer, tokenizer = writer_of(model)
    ids = tokenizer.tokenizer.encode(text)
    parts = parts_of(writer, completion_of(writer, ids, FinishReason.LENGTH))
    assert "".join(parts) == text and len(parts) > len(ids) / CHUNK / 2
    # once at the end, and in the parts until a character is whole
    assert tokenizer.num_decoded <= 8 * len(ids), "anew it would be 38 times"


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_bytes_that_are_no_text_join_to_what_a_whole_answer_has(model: Path, seed: int):
    writer, _ = writer_of(model)
    ids = np.random.default_rng(seed).integers(0, 261, 120).tolist()
    whole = completion_of(writer, ids, FinishReason.LENGTH)
    expected = json.loads(writer_of(model)[0].choice(0, whole))["text"]
    assert "".join(parts_of(writer, whole)) == expected


def test_no_part_holds_what_may_be_the_stop_string(model: Path):
    writer, tokenizer = writer_of(model, stop="def")
    ids = tokenizer.tokenizer.encode("abcde abcdef")
    parts = parts_of(writer, completion_of(writer, ids, FinishReason.STOP))
    assert "".join(parts) == "abcde abc"


@pytest.mark.parametrize(("stop", "said"), [("{end}cd", "ab"), ("b{end}c", "a")])
def test_a_stop_string_with_a_special_token_is_cut_off_whole(model: Path, stop: str, said: str):
    end = load_tokenizer(str(model)).eos_token
    writer, tokenizer = writer_of(model, stop=stop.format(end=end))
    encode = tokenizer.tokenizer.encode
    ids = [*encode("ab"), tokenizer.tokenizer.eos_token_id, *encode("cd" if stop.endswith("d") else "c")]
    parts = parts_of(writer, completion_of(writer, ids, FinishReason.STOP))
    assert "".join(parts) == said


def test_a_whole_answer_joins_its_choices_whatever_a_name_looks_like(model: Path):
    writer, tokenizer = writer_of(model, name='"choices": []', n=2, logprobs=0, return_token_ids=True)
    made = [
        completion_of(writer, tokenizer.tokenizer.encode(text), FinishReason.LENGTH)
        for text in ("one", "two")
    ]
    # as they end, in whatever order
    choices = {place: writer.choice(place, made[place]) for place in (1, 0)}
    answer = json.loads(writer.whole([choices[0], choices[1]]))
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "one"), (1, "two")]
    assert [one["token_ids"] for one in answer["choices"]] == [one.token_ids.tolist() for one in made]
    assert answer["model"] == '"choices": []'
    assert answer["usage"]["completion_tokens"] == sum(one.num_tokens for one in made)


def test_each_part_counts_tokens_where_it_is_asked_to(model: Path):
    writer, _ = writer_of(model, stream=True, stream_options={"continuous_usage_stats": True})
    whole = completion_of(writer, [40, 41, 42, 43], FinishReason.LENGTH)
    counted = []
    for count, is_last in ((2, False), (4, True)):
        so_far = completion_of(writer, whole.token_ids[:count].tolist(), FinishReason.LENGTH)
        counted += [
            json.loads(one.removeprefix("data: ")) for one in writer.parts(0, so_far, is_last=is_last)
        ]
    prompt = writer.asked.num_prompt_tokens
    assert [one["usage"]["completion_tokens"] for one in counted] == [2, 4]
    assert all(one["usage"]["prompt_tokens"] == prompt for one in counted)
    assert list(writer.end()) == ["data: [DONE]\n\n"]


def test_greedy_log_probabilities_are_the_models_own(model: Path):
    for temperature, expected in ((0.0, -1.5), (0.7, -0.25)):
        writer, _ = writer_of(model, temperature=temperature, logprobs=0)
        said = replace(
            completion_of(writer, [40], FinishReason.LENGTH),
            policy_logprobs=np.array([-1.5], dtype=np.float32),
            sampling_logprobs=np.array([-0.25], dtype=np.float32),
        )
        assert json.loads(writer.choice(0, said))["logprobs"]["token_logprobs"] == [expected]


def scored(model: Path, **body: Any) -> dict[str, Any]:
    """The choice of a prompt of three tokens and a response of two, the likeliest beside each."""
    writer, _ = writer_of(model, prompt=[40, 41, 42], **body)
    top = np.array([-0.5, -0.75, -1.0, -np.inf], dtype=np.float32)
    scores = Scores(
        logprobs=np.array([-2, -3, -4, -5], dtype=np.float32),
        top_ids=np.array([[50], [51], [52], [44]]),
        top_logprobs=top[:, None],
        weight_version=0,
    )
    whole = completion_of(writer, [43, 44], FinishReason.LENGTH)
    whole = replace(whole, scores=scores, sampling_logprobs=np.array([-1.5, -1e9], dtype=np.float32))
    choice = json.loads(writer.choice(0, whole))
    (part,) = writer_of(model, prompt=[40, 41, 42], **body)[0].parts(0, whole, is_last=True)
    assert json.loads(part.removeprefix("data: "))["choices"] == [choice]
    return choice


def test_the_likeliest_tokens_stand_beside_the_sampled_one(model: Path):
    choice = scored(model, logprobs=1, return_tokens_as_token_ids=True)
    assert choice["logprobs"] == {
        "tokens": ["token_id:43", "token_id:44"],
        "token_logprobs": [-1.5, -9999.0],
        "top_logprobs": [{"token_id:43": -1.5, "token_id:52": -1.0}, {"token_id:44": -9999.0}],
        "text_offset": [0, 1],
    }


def test_an_echo_has_the_prompt_in_text_and_log_probabilities(model: Path):
    choice, decode = scored(model, logprobs=1, echo=True), load_tokenizer(str(model)).decode
    words = [decode([one]) for one in range(40, 53)]
    assert choice["text"] == "".join(words[:5])
    said = choice["logprobs"]
    assert said["tokens"] == words[:5] and said["text_offset"] == [0, 1, 2, 3, 4]
    assert said["token_logprobs"] == [None, -2.0, -3.0, -1.5, -9999.0]
    assert said["top_logprobs"][:3] == [
        None,
        {words[1]: -2.0, words[10]: -0.5},
        {words[2]: -3.0, words[11]: -0.75},
    ]


def test_a_chats_likeliest_tokens_have_their_bytes(model: Path):
    reader = RequestReader(load_tokenizer(str(model)), model=str(model), served_name="t", max_total_tokens=99)
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    writer = AnswerWriter(reader.read(read_body(json.dumps(body).encode(), ChatBody)), reader._tokenizer, "t")
    before = len(writer.asked.requests[0].prompt.token_ids) - 1
    scores = Scores(
        logprobs=np.zeros(before + 1, dtype=np.float32),
        top_ids=np.tile([65, 66], (before + 1, 1)),
        top_logprobs=np.tile(np.float32([-0.5, -1.0]), (before + 1, 1)),
        weight_version=0,
    )
    said = replace(completion_of(writer, [40], FinishReason.LENGTH), scores=scores)
    (content,) = json.loads(writer.choice(0, said))["logprobs"]["content"]
    assert [one["logprob"] for one in content["top_logprobs"]] == [-0.5, -1.0]
    assert [bytes(one["bytes"]).decode() for one in content["top_logprobs"]] == [
        one["token"] for one in content["top_logprobs"]
    ]


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """A message as OpenAI's clients make it of a stream's deltas."""
    made: dict[str, Any] = {"content": None}
    for delta in deltas:
        for call in delta.pop("tool_calls", ()):
            calls = made.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({key: call[key] for key in ("id", "type", "function")})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for key, more in delta.items():
            made[key] = (made.get(key) or "") + more
    return made


OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 東"}}\n</tool_call>'


def test_ids_of_calls_are_of_the_request_and_as_the_template_takes_them(model: Path):
    def ids(template: str, seed: int = 3) -> list[str]:
        tokenizer = load_tokenizer(str(model))
        tokenizer.chat_template = template
        reader = RequestReader(tokenizer, model=str(model), served_name="t", max_total_tokens=4096)
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [WEATHER], "seed": seed}
        writer = AnswerWriter(reader.read(read_body(json.dumps(body).encode(), ChatBody)), tokenizer, "t")
        whole = completion_of(writer, tokenizer.encode(OSLO + OSLO), FinishReason.LENGTH)
        choice = json.loads(writer.choice(0, whole))
        assert choice["finish_reason"] == "length", "who asked is to know that it was cut"
        return [one["id"] for one in choice["message"]["tool_calls"]]

    (first, second), again = ids(HERMES), ids(HERMES)
    assert first != second and [first, second] == again != ids(HERMES, seed=4)
    assert first.startswith("call_")
    assert [len(one) for one in ids(HERMES + "{# id|length != 9 #}")] == [9, 9]


@pytest.mark.parametrize(
    ("text", "choice", "content", "cities", "reason"),
    [
        ("It is warm.", "auto", "It is warm.", [], "stop"),
        (OSLO, "auto", None, ["Oslo 東"], "tool_calls"),
        (
            "Look:\n" + OSLO + OSLO.replace("Oslo", "Rome"),
            "auto",
            "Look:",
            ["Oslo 東", "Rome 東"],
            "tool_calls",
        ),
        (OSLO.replace("}}", "}"), "auto", OSLO[: OSLO.index("}}") + 1], [], "stop"),
        ("<think>hm</think>" + OSLO, None, None, ["Oslo 東"], "tool_calls"),
        (OSLO, "none", OSLO, [], "stop"),
        (OSLO.removeprefix('<tool_call>\n{"name":'), "required", None, ["Oslo 東"], "tool_calls"),
        (' {"city": "Oslo"}}\n</tool_call>', NAMED, None, ["Oslo"], "stop"),
        (OSLO + OSLO, {"parallel_tool_calls": False}, None, ["Oslo 東"], "tool_calls"),
    ],
)
def test_calls_are_told_whole_and_in_a_stream_alike(
    model: Path, text: str, choice: Any, content: str | None, cities: list[str], reason: str
):
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = HERMES
    reader = RequestReader(tokenizer, model=str(model), served_name="t", max_total_tokens=4096)
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [WEATHER],
        "seed": 3,
        "return_token_ids": True,
    }
    body |= choice if isinstance(choice, dict) and "type" not in choice else {"tool_choice": choice}
    asked = reader.read(read_body(json.dumps(body).encode(), ChatBody))
    writers = [AnswerWriter(asked, tokenizer, "t") for _ in range(2)]
    whole = completion_of(writers[0], [*tokenizer.encode(text), tokenizer.eos_token_id], FinishReason.STOP)
    said = json.loads(writers[0].choice(0, whole))
    message = said["message"]
    assert (message["content"], said["finish_reason"]) == (content, reason)
    calls = message.get("tool_calls", [])
    assert [json.loads(one["function"]["arguments"])["city"] for one in calls] == cities
    assert len({one["id"] for one in calls}) == len(cities)
    assert message.get("reasoning_content") == ("hm" if "hm" in text else None)
    events = []
    for count in range(CHUNK, whole.num_tokens, CHUNK):
        so_far = completion_of(writers[1], whole.token_ids[:count].tolist(), FinishReason.CUT)
        events += writers[1].parts(0, so_far, is_last=False)
    events += writers[1].parts(0, whole, is_last=True)
    parts = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
    assert joined([one["delta"] for one in parts]) == message
    assert [one["finish_reason"] for one in parts if one["finish_reason"]] == [reason]
    assert [token for one in parts for token in one["token_ids"]] == whole.token_ids.tolist()


def sentencepiece(_: Path) -> tuple[PreTrainedTokenizerFast, list[int]]:
    words = ["</s>", "▁a", "▁▁", "<0xE6>", "<0x9D>", "<0xB1>", "<0x0A>", "京", "b"]
    made = Tokenizer(models.WordLevel({word: one for one, word in enumerate(words)}, unk_token="b"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>"), [1, 1, 2, 3, 4, 5, 6, 7, 8, 0]


def byte_level(model: Path) -> tuple[PreTrainedTokenizerFast, list[int]]:
    tokenizer = load_tokenizer(str(model))
    return tokenizer, [*tokenizer.encode("a a  東\n京b"), tokenizer.eos_token_id]  # type: ignore[return-value]


@pytest.mark.parametrize("made", [sentencepiece, byte_level])
def test_bytes_of_tokens_join_to_those_of_the_text_in_a_stream_too(model: Path, made: Any):
    tokenizer, ids = made(model)
    reader = RequestReader(load_tokenizer(str(model)), model=str(model), served_name="t", max_total_tokens=99)
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    writer = AnswerWriter(reader.read(read_body(json.dumps(body).encode(), ChatBody)), tokenizer, "t")
    events = []
    for count in range(1, len(ids) + 1):
        so_far = completion_of(writer, ids[:count], FinishReason.LENGTH)
        events += writer.parts(0, so_far, is_last=count == len(ids))
    choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
    told = [one for choice in choices for one in choice["logprobs"]["content"]]
    text = "".join(choice["delta"]["content"] for choice in choices)
    assert len(told) == len(ids) and text == "a a  東\n京b"
    assert bytes(byte for one in told for byte in one["bytes"]) == text.encode()
