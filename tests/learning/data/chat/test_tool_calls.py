"""Calls of tools are found in ten families' formats, whole and however they are cut; what is broken is told."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.core.errors import ConfigError
from rlhfspec.learning.data.chat.tool_calls import CallParser, ParsedTurn, ToolCall

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "at": {"type": "object"}, "s": {"type": "string"}},
            },
        },
    }
    for name in ("add", "find")
)
ADD = ToolCall("add", {"n": 3, "s": "7"})
FIND = ToolCall("find", {"at": {"x": [1, {"y": "</b>"}]}})
ADD_JSON = '{"n": 3, "s": "7"}'
FIND_JSON = '{"at": {"x": [1, {"y": "</b>"}]}}'


def as_json(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def as_xml(name: str, before: str, between: str, after: str, **arguments: str) -> str:
    return "".join(f"{before}{key}{between}{value}{after}" for key, value in arguments.items())


def hermes(name: str, arguments: str) -> str:
    return f"<tool_call>\n{as_json(name, arguments)}\n</tool_call>"


def coder(name: str, arguments: str) -> str:
    value = {
        ADD_JSON: {"n": "3", "s": "7"},
        FIND_JSON: {"at": FIND_JSON[7:-1]},
    }.get(arguments)
    if value is None:
        return f"<tool_call>\n<functio={name}>\n</tool_call>"
    body = as_xml(name, "<parameter=", ">\n", "\n</parameter>\n", **value)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name: str, arguments: str) -> str:
    value = {ADD_JSON: {"n": "3", "s": "7"}, FIND_JSON: {"at": FIND_JSON[7:-1]}}.get(arguments)
    if value is None:
        return f"<tool_call>{name}\n{{broken\n</tool_call>"
    body = as_xml(name, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", **value)
    return f"<tool_call>{name}\n{body}</tool_call>"


def gemma(name: str, arguments: str) -> str:
    quoted = arguments.replace('"s": "7"', 's:<|"|>7<|"|>').replace('"y": "</b>"', 'y:<|"|></b><|"|>')
    for key in ("n", "at", "x"):
        quoted = quoted.replace(f'"{key}": ', f"{key}:")
    return f"<|tool_call>call:{name}{quoted.replace(', ', ',')}<tool_call|>"


@dataclass(frozen=True)
class Family:
    marks: str
    write: Any
    end: str
    between: str = "\n"
    begin: str = ""
    last: str = ""
    "behind the last call"
    prose: tuple[str, str] = ("let me see", "")
    "around calls"


FAMILIES = {
    "hermes": Family("<tool_call>", hermes, "<|im_end|>", prose=("let me see", "and so")),
    "qwen3-coder": Family("<tool_call> <function=", coder, "<|im_end|>", prose=("let me see", "and so")),
    "glm-4.5": Family("<tool_call> <arg_key>", glm, "<|user|>"),
    "llama-3": Family(
        '<|start_header_id|> "parameters": ', lambda n, a: as_json(n, a, "parameters"), "<|eot_id|>", "; "
    ),
    "llama-3.1": Family(
        '<|start_header_id|> "parameters": ',
        lambda n, a: as_json(n, a, "parameters"),
        "<|eom_id|>",
        "; ",
        "<|python_tag|>",
    ),
    "mistral-v3": Family(
        "[TOOL_CALLS]",
        lambda n, a: as_json(n, f'{a}, "id": "123456789"'),
        "</s>",
        ", ",
        "[TOOL_CALLS] [",
        "]",
    ),
    "mistral-v11": Family("[TOOL_CALLS] [ARGS]", lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{a}", "</s>", ""),
    "deepseek-v3": Family(
        "<｜tool▁call▁begin｜>",
        lambda n, a: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{a}\n```<｜tool▁call▁end｜>",
        "<｜end▁of▁sentence｜>",
        begin="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": Family(
        "<｜tool▁call▁begin｜>",
        lambda n, a: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{a}<｜tool▁call▁end｜>",
        "<｜end▁of▁sentence｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "gpt-oss": Family(
        "<|channel|> <|message|>",
        lambda n, a: f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{a}<|call|>",
        "",
        "<|start|>assistant",
        prose=("<|channel|>commentary<|message|>let me see<|end|><|start|>assistant", ""),
    ),
    "gemma-4": Family("<|tool_call>call:", gemma, "<turn|>", ""),
    "phi-4-mini": Family(
        "<|tool_call|> <|/tool_call|>", as_json, "<|end|>", ",", "<|tool_call|>[", "]<|/tool_call|>"
    ),
    "granite-3": Family("<|tool_call|>", as_json, "<|end_of_text|>", ",", "<|tool_call|>[", "]"),
}


def parser(marks: str, *, response_template: Any = None) -> CallParser:
    tokenizer: Any = SimpleNamespace(
        chat_template=marks, eos_token="<e>", response_template=response_template
    )
    return CallParser(tokenizer)


def streamed(parser: CallParser, text: str, seed: int, prompt: str = "") -> ParsedTurn:
    cuts = random.Random(seed)
    places = sorted(cuts.sample(range(len(text) + 1), min(len(text), cuts.choice([1, 3, 20, 400]))))
    stream = parser.stream(prompt=prompt, tools=TOOLS)
    pieces = [text[first:end] for first, end in zip([0, *places], [*places, len(text)], strict=True)]
    events = [event for piece in pieces for event in stream.feed(piece)] + stream.close()
    return ParsedTurn(
        "".join(one.text for one in events if one.kind == "content"),
        "".join(one.text for one in events if one.kind == "reasoning"),
        tuple(one.call for one in events if one.call is not None),
        tuple(one.text for one in events if one.kind == "unparsed"),
    )


def parse(parser: CallParser, text: str, prompt: str = "") -> ParsedTurn:
    """The turn, the same however it is cut."""
    whole = parser.parse(text, prompt=prompt, tools=TOOLS)
    for seed in range(12):
        assert streamed(parser, text, seed, prompt) == whole
    return whole


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_found_however_the_turn_is_cut(name: str) -> None:
    family = FAMILIES[name]
    reads = parser(family.marks)
    add, find = family.write("add", ADD_JSON), family.write("find", FIND_JSON)
    before, after = family.prose
    for calls, expected in (([add], (ADD,)), ([find], (FIND,)), ([add, find], (ADD, FIND))):
        written = f"{family.begin}{family.between.join(calls)}{family.last}"
        assert parse(reads, f"{written}{family.end}") == ParsedTurn("", "", expected, ())
        around = parse(reads, f"{before}{written}{after}{family.end}")
        assert "".join(around.content.split()) == f"let me see{after}".replace(" ", "")
        assert (around.reasoning, around.calls, around.unparsed) == ("", expected, ())
    broken = parse(reads, f"{family.begin}{family.write('add', '{broken')}{family.last}{family.end}")
    # of a text that is no object, Gemma's dialect knows as little as the others
    assert (broken.calls, len(broken.unparsed)) == ((), 1), broken
    assert "add" in broken.unparsed[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_is_told_and_no_error(name: str) -> None:
    family = FAMILIES[name]
    reads = parser(family.marks)
    whole = f"{family.begin}{family.write('find', FIND_JSON)}"
    for end in range(len(whole) - len(whole) // 4, len(whole) - 12, 3):
        turn = parse(reads, whole[:end])
        assert not turn.calls
        assert turn.unparsed, whole[:end]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "{}"}',
        '{"arguments": {}}',
        '{"name": "add", "arguments": {"n": NaN}}',
        '{"name": "add", "arguments": {"n": "\\ud800"}}',
        '{"name": "add", "arguments": {}} and more',
        '["add"]',
        "[]",
        "",
        '{"a":' * 5000,
    ],
)
def test_what_is_no_call_is_unparsed(call: str) -> None:
    turn = parser("<tool_call>").parse(f"so <tool_call>{call}</tool_call> yes", tools=TOOLS)
    assert (turn.content, turn.calls, len(turn.unparsed)) == ("so  yes", (), 1)


def test_a_call_without_arguments_has_none() -> None:
    turn = parser("<tool_call>").parse('<tool_call>{"name": "add"}</tool_call>', tools=TOOLS)
    assert (turn.calls, turn.unparsed) == ((ToolCall("add", {}),), ())


@pytest.mark.parametrize(
    "body",
    [
        "<function=find>\n<parameter=q>\na\n</function>",
        "<function=find>\n<parameter=q>\na\n</parameter>\n</function>\n<function=add>\n</function>",
    ],
)
def test_broken_xml_is_no_other_call(body: str) -> None:
    turn = parser("<function=").parse(f"<tool_call>\n{body}\n</tool_call>", tools=TOOLS)
    assert (turn.calls, len(turn.unparsed)) == ((), 1)


def test_a_text_of_xml_keeps_its_indentation() -> None:
    body = "<function=find>\n<parameter=q>\n    return x\n\n</parameter>\n</function>"
    (call,) = parser("<function=").parse(f"<tool_call>\n{body}\n</tool_call>", tools=TOOLS).calls
    assert call.arguments == {"q": "    return x\n"}


def test_llama_may_say_the_type_first() -> None:
    text = '{"type": "function", "name": "add", "parameters": {"n": 1}}<|eot_id|>'
    (call,) = parser('<|start_header_id|> "parameters"').parse(text, tools=TOOLS).calls
    assert (call.name, call.arguments) == ("add", {"n": 1})


def test_reasoning_is_apart_and_may_be_opened_by_the_prompt() -> None:
    reads = parser("<tool_call>")
    text = f"7? <tool_call>no\n</think>\n\n{hermes('add', ADD_JSON)}<|im_end|>"
    expected = ParsedTurn("", "7? <tool_call>no", (ADD,), ())
    assert parse(reads, f"<think>\n{text}") == expected
    assert parse(reads, text, prompt="<|im_start|>assistant\n<think>\n") == expected
    assert parse(reads, "so<|im_end|>", prompt="<tool_call>x <think>\n\n</think>\n\n").content == "so"


def test_a_tokenizers_own_response_template_goes_before_the_table() -> None:
    own = {
        "start_anchor": "<a>",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>"},
            "tool_calls": {
                "open_pattern": r"<c (?P<name>\w+)>",
                "close": "</c>",
                "repeats": True,
                "content": "json",
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<e>\s*|$"},
        },
    }
    reads = parser("<tool_call>", response_template=own)
    text = f'x</t>hm<c add>{ADD_JSON}</c><c find>{{"</c> so<e>\n'
    assert parse(reads, text, prompt="<c add><a><t>") == ParsedTurn("hm so", "x", (ADD,), ('<c find>{"',))
    tokenizer: Any = SimpleNamespace(chat_template="<tool_call>", eos_token=None, response_template=own)
    other = CallParser(tokenizer, chat_template="another <tool_call>")
    assert other.parse(hermes("add", ADD_JSON)).calls == (ADD,)


def test_a_call_that_the_end_token_closes_may_lack_it() -> None:
    call = {"open": "<c>", "close": "<|call|>", "content": "json", "transform": {"function": "{content}"}}
    own = {"start_anchor": "<a>", "fields": {"tool_calls": call}}
    for end in ("", "<|call|>"):
        turn = parse(parser("x", response_template=own), f"<c>{as_json('add', ADD_JSON)}{end}")
        assert (turn.calls, turn.unparsed) == ((ADD,), ())
    with pytest.raises(ConfigError, match=r"the tokenizer's response_template is none: .*start_anchor"):
        parser("x", response_template={"fields": {"tool_calls": call}})


def test_a_template_without_a_known_format_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tools: how the model writes calls is not known.*set data\.chat_template"
    ):
        parser("{{ messages }}")
