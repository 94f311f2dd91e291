"""From completions to what OpenAI's clients read, whole or as a stream of parts that join to the same."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...core.records import Completion, FinishReason
from ...learning.data.chat.tool_calls import CallStream
from .engine_requests import Asked
from .request_bodies import ChatBody

_UNFINISHED = "\ufffd"
"What a text ends with where a character's bytes are not all there."
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"SentencePiece's token of one byte."
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"By the letters of byte-level tokens."
_LEAST = -9999.0
"Log-probability that is told of what cannot be drawn, as vLLM."
_NO_CHOICES = '"choices": []'
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CUT: "abort"}


@dataclass(slots=True)
class _Sent:
    """How much of a response a stream has had."""

    tokens: int = 0
    text: str = ""
    offset: int = 0
    "characters of these tokens, each by itself"
    settled: str = ""
    "of the tokens up to `read`, what no further token changes; `text` is what of it cannot be in a stop string"
    begin: int = 0
    read: int = 0
    calls: CallStream | None = None
    "reads the text, where tools may be called"
    num_calls: int = 0


@dataclass(slots=True)
class AnswerWriter:
    """Of one request."""

    asked: Asked
    tokenizer: PreTrainedTokenizerBase
    served_name: str
    _sent: dict[int, _Sent] = field(default_factory=dict)
    _texts: dict[tuple[int, bool], str] = field(default_factory=dict)
    "of tokens, by whether they stand first"
    _id: str = field(default_factory=lambda: secrets.token_hex(12))
    _created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message."""
        return isinstance(self.asked.body, ChatBody)

    def choice(self, place: int, completion: Completion) -> str:
        """A response that has ended, as JSON, for an answer without a stream; of any thread, once a place."""
        text = self._echoed(place) + self._text(place, completion)
        said = {"message": self._message(place, text)} if self.is_chat else {"text": text}
        choice = self._choice(place, completion, said, first=0, is_last=True)
        self._sent.setdefault(place, _Sent()).tokens = completion.num_tokens
        return _json(choice)

    def whole(self, choices: list[str]) -> str:
        """The answer, as JSON, to a request that asks for no stream; of each response's choice."""
        answer = self._envelope([], "chat.completion" if self.is_chat else "text_completion")
        if self.is_chat and self.asked.body.return_token_ids:
            answer["prompt_token_ids"] = self.asked.requests[0].prompt.token_ids.tolist()
        said = _json(answer | {"usage": self._usage()})
        # quotes within texts are escaped: nothing else reads so
        return said.replace(_NO_CHOICES, f'"choices": [{", ".join(choices)}]')

    def parts(self, place: int, completion: Completion, *, is_last: bool) -> Iterator[str]:
        """What a response has more than was sent of it, as events of a stream; `is_last`: it has ended."""
        is_first, sent = place not in self._sent, self._sent.setdefault(place, _Sent())
        if completion.num_tokens <= sent.tokens and not is_last:
            return
        text = self._text(place, completion) if is_last else self._text_so_far(sent, completion)
        # what echoes comes in one part
        new = self._echoed(place) + text[len(sent.text) :]
        said: list[dict[str, Any]] = [{"text": new}]
        if self.is_chat:
            said = [{"delta": delta} for delta in self._deltas(place, new, is_last=is_last)]
            said[0]["delta"] |= {"role": "assistant"} if is_first else {}
        first, sent.tokens, sent.text = sent.tokens, completion.num_tokens, sent.text + new
        options = self.asked.body.stream_options
        usage = {"usage": self._usage()} if options.continuous_usage_stats else {}
        for at, one in enumerate(said, start=1):
            choice = self._choice(place, completion, one, first=first, is_last=is_last and at == len(said))
            first = completion.num_tokens
            yield event(self._envelope([choice], self._part_kind) | usage)

    def _deltas(self, place: int, new: str, *, is_last: bool) -> list[dict[str, Any]]:
        """What a message goes on with; a call's name, then its arguments, where calls are read."""
        if self.asked.parser is None:
            return [{"content": new}]
        sent, request = self._sent.setdefault(place, _Sent()), self.asked.requests[place]
        body = cast(ChatBody, self.asked.body)
        if sent.calls is None:
            sent.calls = self.asked.parser.stream(prompt=request.prompt.text, tools=body.tools)
            new = self.asked.forced + new
        deltas: list[dict[str, Any]] = []
        for found in (*sent.calls.feed(new), *(sent.calls.close() if is_last else ())):
            if found.call is None:
                # of a call that does not parse the text, as vLLM
                deltas.append({"reasoning_content" if found.kind == "reasoning" else "content": found.text})
            elif body.parallel_tool_calls or not sent.num_calls:
                number = request.key.sample_index + sent.num_calls
                named = f"{number % 16**9:09x}" if self.asked.has_short_ids else f"call_{number:017x}"
                function = {"name": found.call.name, "arguments": ""}
                parts = (
                    {"id": named, "type": "function", "function": function},
                    {"function": {"arguments": _json(found.call.arguments)}},
                )
                deltas += [{"tool_calls": [{"index": sent.num_calls} | part]} for part in parts]
                sent.num_calls += 1
        return deltas or [{}]

    def _message(self, place: int, text: str) -> dict[str, Any]:
        """The whole message: what its deltas join to."""
        texts: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        for delta in self._deltas(place, text, is_last=True):
            for part in delta.pop("tool_calls", ()):
                if part.pop("index") == len(calls):
                    calls.append(part)
                else:
                    calls[-1]["function"] |= part["function"]
            texts |= {key: texts.get(key, "") + more for key, more in delta.items()}
        message = {"role": "assistant", "content": None if calls else ""} | texts
        return message | ({"tool_calls": calls} if calls else {})

    def end(self) -> Iterator[str]:
        """The last events."""
        if self.asked.body.stream_options.include_usage:
            yield event(self._envelope([], self._part_kind) | {"usage": self._usage()})
        yield "data: [DONE]\n\n"

    @property
    def _part_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _envelope(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self._id}",
            "object": kind,
            "created": self._created,
            "model": self.served_name,
            "seed": self.asked.seed,
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        prompt, sampled = self.asked.num_prompt_tokens, sum(sent.tokens for sent in self._sent.values())
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _choice(
        self, place: int, completion: Completion, said: dict[str, Any], *, first: int, is_last: bool
    ) -> dict[str, Any]:
        """A choice, of which tokens from `first` on are told."""
        body = self.asked.body
        choice = {
            "index": place,
            **said,
            "logprobs": self._logprobs(place, completion, first) if body.wants_logprobs else None,
            "finish_reason": self._reason(place, completion) if is_last else None,
        }
        if is_last:
            choice["weight_versions"] = [span.weight_version for span in completion.weight_spans]
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids[first:].tolist()
            if not self.is_chat and first == 0:
                choice["prompt_token_ids"] = self.asked.requests[place].prompt.token_ids.tolist()
        return choice

    def _reason(self, place: int, completion: Completion) -> str:
        """Why a response ended; as OpenAI's, a call of a function that was named is no reason."""
        reason, calls = _REASONS[completion.finish_reason], self.asked.parser and self._sent[place].num_calls
        is_called = calls and reason == "stop" and cast(ChatBody, self.asked.body).forced_tool is None
        return "tool_calls" if is_called else reason

    def _echoed(self, place: int) -> str:
        """The prompt's text, where it is to stand before the response."""
        prompt = self.asked.requests[place].prompt
        return (prompt.text or self._decode(prompt.token_ids.tolist())) if self.asked.body.echoes else ""

    def _text(self, place: int, completion: Completion) -> str:
        """A whole response's text up to what stopped it."""
        ids = completion.token_ids.tolist()
        includes = self.asked.body.include_stop_str_in_output
        if completion.finish_reason is not FinishReason.STOP:
            return self._decode(ids)
        # as vLLM: among the tokens and their log-probabilities, not in the text
        ends = () if includes else self.asked.requests[place].sampling.stop_token_ids
        ids = ids[:-1] if ids[-1] in ends else ids
        text, stops = self._decode(ids), self.asked.body.stops
        places = [at + len(stop) * includes for stop in stops if (at := text.find(stop)) >= 0]
        if places or not stops or includes:
            return text[: min(places, default=len(text))]
        return self._before_special(ids, stops)

    def _before_special(self, ids: list[int], stops: Sequence[str]) -> str:
        """The text before a stop string that has a special token, which the text does not show."""
        whole = self._decode(ids, skips=False)
        at = min((at for stop in stops if (at := whole.find(stop)) >= 0), default=len(whole))
        last: list[int] = []
        while len(shown := self._decode(ids, skips=False)) > at:
            ids, last = ids[:-1], ids[-1:]
        # of the token in which it begins
        begun = whole[len(shown) : at] if len(shown) < at and self._decode(last) else ""
        return self._decode(ids) + begun

    def _text_so_far(self, sent: _Sent, completion: Completion) -> str:
        """Of a response that goes on, what no further token changes.

        As vLLM's `detokenize_incrementally`: new tokens are decoded behind those of the part before, which give them
        their context, and settle once no character's bytes are missing at the end.
        """
        before = self._decode(completion.token_ids[sent.begin : sent.read].tolist())
        now = self._decode(completion.token_ids[sent.begin :].tolist())
        if not now.endswith(_UNFINISHED):
            sent.settled += now[len(before) :]
            sent.begin, sent.read = sent.read, completion.num_tokens
        stops = () if self.asked.body.include_stop_str_in_output else self.asked.body.stops
        held = max((len(stop) - 1 for stop in stops), default=0)
        return sent.settled[: len(sent.settled) - held]

    def _decode(self, ids: list[int], *, skips: bool = True) -> str:
        return str(
            self.tokenizer.decode(
                ids,
                # of calls special tokens are a part
                skip_special_tokens=skips
                and self.asked.body.skip_special_tokens
                and self.asked.parser is None,
                clean_up_tokenization_spaces=False,
            )
        )

    def _added(self, one: int, *, is_first: bool) -> str:
        """What a token adds to a text, whose first one may lose the space before it."""
        if (one, is_first) not in self._texts:
            alone, twice = (
                str(self.tokenizer.decode([one] * count, clean_up_tokenization_spaces=False))
                for count in (1, 2)
            )
            said = alone if is_first or _UNFINISHED in alone else twice[len(alone) :]
            self._texts[one, is_first] = said
        return self._texts[one, is_first]

    def _logprobs(self, place: int, completion: Completion, first: int) -> dict[str, Any]:
        """Of the distribution that was sampled from: behind temperature, top-k and top-p; at temperature 0 the model's.

        The last as vLLM: the one that greedy decoding samples from would be 0 everywhere.
        """
        request, scores = self.asked.requests[place], completion.scores
        is_greedy = request.sampling.temperature == 0.0
        values = (completion.policy_logprobs if is_greedy else completion.sampling_logprobs)[first:].tolist()
        ids, tops = completion.token_ids[first:].tolist(), [[] for _ in range(first, completion.num_tokens)]
        if scores is not None:
            begin = 0 if self.asked.body.echoes else len(request.prompt.token_ids) - 1
            rows = zip(scores.top_ids[begin:].tolist(), scores.top_logprobs[begin:].tolist(), strict=True)
            tops = [list(zip(*row, strict=True)) for row in rows][first:]
            if self.asked.body.echoes:
                ids, tops = request.prompt.token_ids.tolist() + ids, [[], *tops]
                values = [None, *scores.logprobs[: len(ids) - len(values) - 1].tolist(), *values]
        said = [
            self._token(one, value, first + at)
            for at, (one, value) in enumerate(zip(ids, values, strict=True))
        ]
        best = [[self._token(*one, first + at) for one in top] for at, top in enumerate(tops)]
        if self.is_chat:
            return {"content": [one | {"top_logprobs": top} for one, top in zip(said, best, strict=True)]}
        sent = self._sent.setdefault(place, _Sent())
        texts = [self._added(one, is_first=first + at == 0) for at, one in enumerate(ids)]
        *offsets, sent.offset = accumulate(map(len, texts), initial=sent.offset)
        return {
            "tokens": [one["token"] for one in said],
            "token_logprobs": [one["logprob"] for one in said],
            "top_logprobs": [
                # of two tokens of one name the likelier one's
                None
                if one["logprob"] is None
                else {each["token"]: each["logprob"] for each in (one, *reversed(top))}
                for one, top in zip(said, best, strict=True)
            ],
            "text_offset": offsets,
        }

    def _token(self, one: int, value: float | None, place: int) -> dict[str, Any]:
        """A token with its log-probability, as a chat tells it; `place`: from the beginning of the text."""
        text = self._added(one, is_first=place == 0)
        said = {"token": f"token_id:{one}" if self.asked.body.return_tokens_as_token_ids else text}
        # of a token that the filters leave out: JSON has no infinity
        said |= {"logprob": value if value is None else max(value, _LEAST)}
        if not self.is_chat:
            return said
        # a token that the text skips has none: those of all join to the text's
        part = (
            _bytes(str(self.tokenizer.convert_ids_to_tokens(one)), text) if self._decode([one, one]) else []
        )
        return said | {"bytes": part}


def _bytes(token: str, text: str) -> list[int]:
    """A token's own where it is a part of a character, which its text is not; else its text's."""
    if _UNFINISHED in text and (byte := _BYTE_TOKEN.fullmatch(token)):
        return [int(byte[1], 16)]
    if _UNFINISHED in text and _BYTES.keys() >= set(token):
        return [_BYTES[letter] for letter in token]
    return list(text.encode())


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {_json(data)}\n\n"


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, ensure_ascii=False)
