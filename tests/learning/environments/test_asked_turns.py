"""A program that asks a model over OpenAI's API: its questions are turns, its conversation must go on by them."""

import asyncio
import json
import threading
import urllib.error
import urllib.request

import pytest

from rlhfspec.core.errors import EpisodeError
from rlhfspec.learning.environments.asked_turns import ClientProgram

ASK = [{"role": "user", "content": "begin"}]


def post(address: str, body: dict) -> dict:
    request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def talk(*further: dict, **body):
    """A program that says a message of `further` behind each answer, and returns all that was said."""

    async def run(address: str) -> list[dict]:
        messages = [*ASK]
        for message in (None, *further):
            messages += [message] if message else []
            messages.append(
                await asyncio.to_thread(post, address, {"model": "m", "messages": messages, **body})
            )
        return messages

    return ClientProgram(run, ())


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_what_is_asked_is_given_turn_by_turn_and_the_program_reads_the_answers():
    parts = {"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "text", "text": " on"}]}
    program = talk(parts, {"role": "tool", "content": "4", "tool_call_id": "c"})
    assert program.asked() == ASK
    program.reply(assistant("one"))
    assert program.asked() == [{"role": "user", "content": "go on"}]
    program.reply(assistant("two"))
    assert program.asked() == [{"role": "tool", "content": "4", "tool_call_id": "c"}]
    program.reply(assistant("three"))
    assert program.asked() is None
    assert [one["content"] for one in program.result() if one["role"] == "assistant"] == [
        "one",
        "two",
        "three",
    ]


def test_many_programs_ask_at_the_same_time_and_each_hears_its_own():
    programs = [talk({"role": "user", "content": str(i)}) for i in range(12)]
    for i, program in reversed([*enumerate(programs)]):
        assert program.asked() == ASK
        program.reply(assistant(f"to {i}"))
    for i, program in enumerate(programs):
        assert program.asked() == [{"role": "user", "content": str(i)}]
        program.reply(assistant("end"))
        assert program.asked() is None
        assert program.result()[1]["content"] == f"to {i}"


@pytest.mark.parametrize(
    ("body", "tools", "what"),
    [
        ({"temperature": 0.3}, (), "temperature"),
        ({"n": 2}, (), "a turn has one answer"),
        ({"stream": True}, (), "an answer comes whole"),
        ({"tools": [{"function": {"name": "add"}}]}, (), "asks with the tools add, the prompt has none"),
        ({}, ({"function": {"name": "add"}},), "asks with the tools none, the prompt has add"),
    ],
)
def test_a_question_for_what_no_turn_has_is_refused(body, tools, what):
    program = talk(**body)
    with pytest.raises(EpisodeError, match=what):
        program.asked(tools)
    program.close()


def test_a_conversation_that_is_made_anew_is_refused():
    async def run(address: str) -> None:
        for text in ("begin", "something else"):
            body = {"messages": [{"role": "user", "content": text}]}
            await asyncio.to_thread(post, address, body)

    program = ClientProgram(run, ())
    program.asked()
    program.reply(assistant("one"))
    with pytest.raises(EpisodeError, match=r"does not go on from what was said before \(message 0 differs"):
        program.asked()
    program.close()


def test_an_answer_without_room_ends_a_program_as_servers_do():
    heard = []

    async def run(address: str) -> str:
        try:
            await asyncio.to_thread(post, address, {"messages": ASK})
        except urllib.error.HTTPError as error:
            heard.append((error.code, json.load(error)["error"]["message"]))
        return "scored"

    program = ClientProgram(run, ())
    program.asked()
    program.reply(None)
    assert program.asked() is None and program.result() == "scored"
    assert heard == [(400, "This model's maximum context length is used up")]


def test_a_program_that_is_let_go_leaves_no_thread_waiting():
    before = {thread for thread in threading.enumerate() if "process_request_thread" in thread.name}
    program = talk()
    program.asked()
    (waiting,) = {t for t in threading.enumerate() if "process_request_thread" in t.name} - before
    program.close()
    waiting.join(20.0)
    assert not waiting.is_alive()


def test_what_a_program_raises_is_raised():
    async def run(address: str) -> None:
        raise KeyError("no such row")

    program = ClientProgram(run, ())
    assert program.asked() is None
    with pytest.raises(KeyError, match="no such row"):
        program.result()
