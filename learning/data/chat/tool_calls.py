"""Calls of tools in what the assistant wrote, by transformers' response parser.

A tokenizer that carries a `response_template` is read by that; for others the wire formats stand in a table, found by
what a chat template's text holds. Source: the models' chat templates; the fields are transformers' (chat_parsing).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from ....core.errors import ConfigError
from .chat_format import REASONING, own_template
from .messages import Tools

_CALLS = "tool_calls"
_END_OF_TEXT = "\uffff"
"No character of a text: what is still open when it comes was never closed."
_ENDS = (
    *(
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "</s>",
        "<|end|>",
        "<|return|>",
    ),
    *("<|call|>", "<|user|>", "<|observation|>", "<end_of_turn>", "<turn|>", "<eos>", "<|tool_response>"),
    *("<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<|start|>assistant"),
)
"What is of the format alone, and no word of a content."
_WHOLE = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that parsed."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """What a stream has come to: a piece of content or reasoning, a whole call, or the text of one that is none."""

    kind: Literal["content", "reasoning", "call", "unparsed"]
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One turn of the assistant's."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    unparsed: tuple[str, ...]
    "texts of calls that do not parse"


@dataclass(frozen=True, slots=True)
class _Format:
    """A wire format: where a call begins and ends, and the field that reads it from there."""

    marks: tuple[str, ...]
    "all are in the text of a chat template that writes it"
    begins: str
    ends: str
    "left open with `|`: at the end of the turn too"
    call: dict[str, Any]
    reasoning: tuple[str, str] = ("<think>", "</think>")
    content: str | None = None
    "what opens a content; None: all that is nothing else"
    once: str = ""
    "of which a call has one"
    argument: str = ""
    "of which a call has one for each argument"


def _xml(name: str, key: str, value: str) -> dict[str, Any]:
    pattern = f"{key}{value}"
    return {
        "open_pattern": name,
        "content": "xml-inline",
        "content_args": {"tag_pattern": pattern},
        "transform": _NAMED,
    }


def _json(begins: str, transform: dict[str, Any] = _NAMED, **args: Any) -> dict[str, Any]:
    return {"open_pattern": begins, "content": "json", "content_args": args, "transform": transform}


_FORMATS = (
    _Format(  # gpt-oss; its template and the model itself put the recipient on either side of the channel
        ("<|channel|>", "<|message|>"),
        r"(?:<\|channel\|>commentary\s+)?to=",
        "|",
        _json(r"[\s\S]*?to=(?:functions\.)?(?P<name>[^\s<]+)[\s\S]*?<\|message\|>"),
        reasoning=(r"<\|channel\|>analysis<\|message\|>", r"<\|end\|>"),
        content=r"<\|channel\|>(?:final|commentary)<\|message\|>",
    ),
    _Format(  # DeepSeek V3 and R1 write the type and a fence, V3.1 neither
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁begin｜>",
        r"\s*(?:```\s*)?<｜tool▁call▁end｜>",
        _json(
            r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?=[^\s{]))?(?P<name>[^\s｜<]+)\s*"
            r"(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?=\{)"
        ),
    ),
    _Format(  # Mistral since v11
        ("[TOOL_CALLS]", "[ARGS]"),
        r"\[TOOL_CALLS\]",
        r"(?=\[TOOL_CALLS\])|",
        _json(r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*"),
        reasoning=(r"\[THINK\]", r"\[/THINK\]"),
    ),
    _Format(("[TOOL_CALLS]",), r"\[TOOL_CALLS\]", "|", _json(r"\[TOOL_CALLS\]\s*", _WHOLE)),
    _Format(  # GLM 4.5
        ("<arg_key>",),
        "<tool_call>",
        "</tool_call>",
        _xml(
            r"<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<arg_key>|$)",
            r"<arg_key>(?P<key>[^<]+)</arg_key>",
            r"\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
        argument="<arg_key>",
    ),
    _Format(  # Qwen3-Coder, Qwen3.5, Nemotron 3
        ("<function=",),
        "<tool_call>",
        "</tool_call>",
        _xml(
            r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            r"<parameter=(?P<key>[^>\n]+)>",
            r"\n?(?P<value>.*?)\n?</parameter>",
        ),
        once="<function=",
        argument="<parameter=",
    ),
    _Format(  # Gemma 4
        ("<|tool_call>call:",),
        r"<\|tool_call>",
        r"<tool_call\|>",
        _json(r"<\|tool_call>call:(?P<name>\w+)", unquoted_keys=True, string_delims=[['<|"|>', '<|"|>']]),
        reasoning=(r"<\|channel>thought\n", r"<channel\|>"),
    ),
    _Format(("<|/tool_call|>",), r"<\|tool_call\|>", r"<\|/tool_call\|>", _json(r"<\|tool_call\|>", _WHOLE)),
    _Format(("<tool_call>",), "<tool_call>", "</tool_call>", _json("<tool_call>", _WHOLE)),  # Hermes, Qwen
    _Format(("<|tool_call|>",), r"<\|tool_call\|>", "|", _json(r"<\|tool_call\|>", _WHOLE)),  # Granite
    _Format(  # Llama 3
        ("<|start_header_id|>", '"parameters"'),
        r'<\|python_tag\|>|(?=\{\s*"(?:type|name)"\s*:[^{}]{0,200}?"(?:parameters|arguments)"\s*:)',
        "|",
        _json(r"(?:<\|python_tag\|>)?", _WHOLE),
    ),
)


class CallParser:
    """Reads the turns of one tokenizer's models."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        """A parser for what follows prompts that `chat_template` rendered; None: the tokenizer's own.

        Raises ConfigError: neither does the tokenizer say how calls are written, nor is the template known.
        """
        own = own_template(tokenizer, tools=({},))
        template = chat_template or own or ""
        said: Any = getattr(tokenizer, "response_template", None)
        ends = regex.compile(_any_of({*_ENDS, str(tokenizer.eos_token or _ENDS[0])}))
        self._once, self._argument = "", ""
        self._ends, self._is_own = ends, template == own and _CALLS in (said or {}).get("fields", ())
        if self._is_own:
            try:
                self._spec, self._read = load_response_template(said), _reading(said)
            except ValueError as error:
                raise ConfigError(f"the tokenizer's response_template is none: {error}; fix it") from error
        else:
            row = next((one for one in _FORMATS if all(mark in template for mark in one.marks)), None)
            if row is None:
                raise ConfigError(
                    "tools: how the model writes calls is not known: expected a tokenizer with a response_template, or "
                    "a chat template in the format of Hermes, Llama, Qwen, Mistral, DeepSeek, GLM, Gemma 4, Phi or "
                    "gpt-oss, got neither; set data.chat_template or the tokenizer's response_template"
                )
            self._once, self._argument = row.once, row.argument
            self._spec = load_response_template(_spec_of({_CALLS: row.call}))
            self._read = _reading(_fields_of(row, ends.pattern))
        closing = self._read.fields[_CALLS].close_re
        self.is_open_to_the_end = closing is None or any(map(closing.search, (_END_OF_TEXT, *_ENDS)))
        "a call may end with its turn, whose end token may have been cut off"

    def parse(self, text: str, *, prompt: str = "", tools: Tools = ()) -> ParsedTurn:
        """A turn's content, reasoning and calls.

        Args:
            text: the turn, with special tokens.
            prompt: what stands before it, or the end of that: the template may have opened the reasoning there.
            tools: whose schemas say what a value is that is written as bare text.
        """
        return as_turn(self.events(text, prompt=prompt, tools=tools))

    def events(self, text: str, *, prompt: str = "", tools: Tools = ()) -> list[TurnEvent]:
        """The same in its order."""
        stream = self.stream(prompt=prompt, tools=tools)
        return [*stream.feed(text), *stream.close()]

    def of_episode(self, text: str, *, prefill: str, tools: Tools) -> list[TurnEvent]:
        """The events of any turn behind a prompt that ended in `prefill`.

        Templates open the reasoning in the first turn, or in every one: where it is never closed it was not open, so
        that a call in it is one.
        """
        events = self.events(text, prompt=prefill, tools=tools)
        is_open = all(one.kind == "reasoning" for one in events)
        return self.events(text, tools=tools) if prefill and is_open else events

    def stream(self, *, prompt: str = "", tools: Tools = ()) -> CallStream:
        """The same, piece by piece."""
        if not self._is_own:  # of a prompt of ours nothing counts but a reasoning that is open
            opening = self._read.fields[REASONING[0]].open_re.pattern
            opened = regex.search(rf"(?:{opening})\s*\Z", prompt)
            prompt = opened[0] if opened is not None else ""
        return CallStream(self, ResponseParser(self._read, prefix=prompt), tools)

    def calls_of(self, opened: str, body: str, tools: Tools, *, closed: bool) -> list[TurnEvent]:
        """What a region of calls holds."""
        whole = regex.sub(rf"\s*(?:{self._ends.pattern})*\s*\Z", "", opened + body)
        if not closed and not self.is_open_to_the_end:
            return [TurnEvent("unparsed", whole)]
        try:
            pieces, rest = self._pieces(whole[len(opened) :])
            events = [
                TurnEvent("call", call=call)
                for piece in pieces
                for call in self._calls(opened + piece, list(tools))
            ]
        except Exception:  # what a model writes may be anything
            return [TurnEvent("unparsed", whole)]
        return [*events, TurnEvent("content", rest)] if rest else events

    def _pieces(self, body: str) -> tuple[list[str], str]:
        """The JSON values that a body holds, one behind the other, and what follows them; any other body as it is."""
        field = self._spec.fields[_CALLS]
        if field.content != "json" or field.content_args or body.lstrip()[:1] not in ("{", "["):
            return [body], ""
        pieces, at, decoder = [], len(body) - len(body.lstrip()), json.JSONDecoder()
        while body[at : at + 1] in ("{", "["):
            _, end = decoder.raw_decode(body, at)
            pieces.append(body[at:end])
            at = len(body) - len(body[end:].lstrip("\n\r\t ;,"))
        if body[at:] and not self.is_open_to_the_end:
            raise ValueError("more than calls within the marks of a call")
        return pieces, body[at:]

    def _calls(self, text: str, tools: list[Any]) -> list[ToolCall]:
        found = _flat(parse_response(text, self._spec, prefix="", tools=tools).get(_CALLS))
        calls = [call for one in found for call in _flat(one.get("function", one))]
        if not calls or (self._once and text.count(self._once) > 1):
            raise ValueError("not one call")
        for call in calls:
            arguments = call["arguments"] = call.get("arguments", call.get("parameters", {}))
            if not (isinstance(call["name"], str) and call["name"] and isinstance(arguments, dict)):
                raise ValueError("a call has a name and an object of arguments")
            if self._argument and text.count(self._argument) != len(arguments):
                raise ValueError("an argument that is not closed")
            # nothing that JSON or UTF-8 cannot hold
            json.dumps([call["name"], arguments], allow_nan=False, ensure_ascii=False).encode()
        return [ToolCall(call["name"], call["arguments"]) for call in calls]


def as_turn(events: Sequence[TurnEvent]) -> ParsedTurn:
    """The turn that a stream has come to."""
    return ParsedTurn(
        content="".join(one.text for one in events if one.kind == "content"),
        reasoning="".join(one.text for one in events if one.kind == "reasoning"),
        calls=tuple(one.call for one in events if one.call is not None),
        unparsed=tuple(one.text for one in events if one.kind == "unparsed"),
    )


class CallStream:
    """A turn as it is written. However its text is cut, its events say the same."""

    def __init__(self, parser: CallParser, reader: ResponseParser, tools: Tools) -> None:
        self._parser, self._reader, self._tools = parser, reader, tools
        self._held: dict[str, str | None] = {"content": None, "reasoning": None}

    def feed(self, text: str) -> list[TurnEvent]:
        """Take a piece of the turn; return what it makes certain."""
        return list(self._events(self._reader.feed(text)))

    def close(self) -> list[TurnEvent]:
        """The turn has ended; return the rest."""
        events = [*self._events(self._reader.feed(_END_OF_TEXT))]
        _, last = self._reader.finalize()
        return [*events, *self._events(last)]

    def _events(self, read: Sequence[dict[str, Any]]) -> Iterator[TurnEvent]:
        for one in read:
            field = one["field"]
            if field == _CALLS and one["type"] == "region_close":
                opened, body = one["value"]["opened"], one["value"]["body"]
                closed = not body.endswith(_END_OF_TEXT)
                for event in self._parser.calls_of(
                    opened, body.removesuffix(_END_OF_TEXT), self._tools, closed=closed
                ):
                    yield from self._say("content", event.text) if event.kind == "content" else [event]
            elif one["type"] == "region_chunk" and field != _CALLS:
                kind = "reasoning" if field in REASONING else "content"
                yield from self._say(kind, one["text"].removesuffix(_END_OF_TEXT))

    def _say(self, kind: Literal["content", "reasoning"], text: str) -> Iterator[TurnEvent]:
        """Blanks at either end are not told, those in between with what follows."""
        held = self._held[kind]
        text = (held or "") + text if held is not None else text.lstrip()
        said = text.rstrip()
        if said:
            self._held[kind] = text[len(said) :]
            yield TurnEvent(kind, said)
        elif held is not None:
            self._held[kind] = text


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [inner for one in value for inner in _flat(one)]
    return [] if value is None else [value]


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(regex.escape(one) for one in sorted(texts, key=lambda text: (-len(text), text)))


def _spec_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"start_anchor_pattern": "^", "fields": fields}


def _fields_of(row: _Format, ends: str) -> dict[str, Any]:
    opened, closed = row.reasoning
    content: dict[str, Any] = {"close_pattern": ends}
    last = rf"{row.ends.lstrip('|')}{ends}|$" if row.ends.endswith("|") else row.ends
    fields = {
        REASONING[0]: {"open_pattern": opened, "close_pattern": closed},
        _CALLS: {"open_pattern": row.begins, "close_pattern": last},
        "content": content,
    }
    if row.content is not None:
        fields |= {"said": {"open_pattern": row.content, "close_pattern": ends}}
    return _spec_of(fields)


def _reading(spec: dict[str, Any]) -> ResponseTemplate:
    """The template that finds the same regions, and keeps each one's text as it is: nothing in it can fail."""
    fields = {}
    for name, field in spec["fields"].items():
        kept = {key: held for key, held in field.items() if key in ("close", "close_pattern")}
        if kept.get("close_pattern", "").endswith("|$"):  # which is found at the end of every piece of a text
            kept["close_pattern"] = kept["close_pattern"].removesuffix("$") + _END_OF_TEXT
        opening = field.get("open_pattern") or _any_of_literals(field.get("open"))
        if opening:
            kept |= {
                "open_pattern": f"(?P<opened>{opening})",
                "transform": {"opened": "{opened}", "body": "{content}"},
            }
        fields[name] = {**kept, "content": "text", "content_args": {"strip": False}, "repeats": True}
    anchors = {key: held for key, held in spec.items() if key.startswith("start_anchor")}
    return load_response_template({**anchors, "fields": fields})


def _any_of_literals(given: Any) -> str:
    return _any_of([given] if isinstance(given, str) else given) if given else ""
