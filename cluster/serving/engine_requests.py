"""From a body to samples: prompts are tokenised, what ends a response is looked up, each sample gets its key.

A response is a pure function of weights, prompt and key, and the key one of seed, prompt and number among the request's
equal prompts: with the same seed the same request gives the same tokens, whoever asks beside it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...core.errors import InputError, ModelError
from ...core.outside import cut, quote
from ...core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from ...core.settings.data import DataConfig
from ...core.surfaces.surface import note_once, surface
from ...engine.requests import require_can_be_sampled
from ...engine.weights.generation_settings import load_generation_settings
from ...engine.weights.loading import num_token_ids
from ...learning.data.chat.chat_format import no_template, own_template, render_chat, require_written
from ...learning.data.chat.end_tokens import model_end_tokens, turn_end
from ...learning.data.chat.messages import Tools, Turn, num_shared, parse_turns, require_whole_text
from ...learning.data.chat.template_variables import template_variables
from ...learning.data.chat.tool_calls import CallParser
from ...learning.data.prompt_tokens import encode_texts, prompt_ids
from .api_error import ApiError, refuse
from .request_bodies import ChatBody, CompletionBody, GenerationBody, require_known

MAX_STOPS, MAX_STOP_CHARS = 16, 256
"Stop strings of a request, and characters of one: each is looked for in every step."
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one request asks for: its samples, `n` of each prompt side by side."""

    body: GenerationBody
    seed: int
    requests: list[SampleRequest]
    parser: CallParser | None = None
    "of calls in responses; None: they stay text"
    forced: str = ""
    "what responses go on from: the template's beginning of a call, behind the prompt's `text`"
    has_short_ids: bool = False
    "of calls: templates of Mistral's take nine letters and digits alone"

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each once."""
        return sum(len(one.prompt.token_ids) for one in self.requests[:: self.body.n])


def sample_key(seed: int, prompt: Sequence[int], number: int) -> SampleKey:
    """The key of the `number`-th response, from 0, to a prompt under a seed of 64 bits.

    The scheduler knows samples by their keys, so the prompt takes part in it.
    """
    words = np.array([seed, number, *prompt], dtype="<i8")
    digest = hashlib.blake2b(words.tobytes(), digest_size=8).digest()
    return SampleKey(run_seed=0, stream=Stream.EVAL, sample_index=int.from_bytes(digest, "little"))


def usual_sampling(model: str, source: Literal["auto", "vllm"] = "auto") -> dict[str, Any]:
    """What bodies leave out, as a model's generation_config.json has it, also where do_sample is off, as in vLLM.

    `source` vllm: none of it. Raises ModelError for what the engine cannot do and vLLM would.
    """
    settings = load_generation_settings(model) if source == "auto" else None
    usual = {} if settings is None else settings.to_diff_dict()
    surface("request.generation_config").require(
        usual, f"the generation_config.json of '{model}'", error=ModelError
    )
    return {key: value for key, value in usual.items() if value is not None}


class RequestReader:
    """Of one model and its tokenizer; may be used by several threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: str,
        served_name: str,
        max_total_tokens: int,
        usual: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`model`: path or name, for its end tokens; `served_name`: what clients call it; `usual`: `usual_sampling`."""
        self._tokenizer, self._model = tokenizer, model
        self._served_name, self._max_total_tokens = served_name, max_total_tokens
        self._vocab_size = num_token_ids(tokenizer)
        self._ends = model_end_tokens(tokenizer, model)
        self._usual = usual

    def read(self, body: CompletionBody | ChatBody) -> Asked:
        """The samples that a body asks for. Raises ApiError naming the key at fault."""
        if body.model:
            self.require_served(body.model)
        if body.best_of not in (None, body.n):
            raise refuse(
                f"best_of must equal n ({body.n}), got {body.best_of}; all responses are returned", "best_of"
            )
        parser, forced = None, ""
        if isinstance(body, ChatBody):
            parser = _as_api_error(lambda: self._call_parser, "tools") if body.wants_calls else None
            text, forced = self._chat_text(body)
            prompts, texts = encode_texts(self._tokenizer, [text + forced], special=False), [text]
        else:
            prompts, texts = self._prompts(body)
        seed = secrets.randbits(63) if body.seed in (None, -1) else body.seed
        seen: Counter[tuple[int, ...]] = Counter()
        requests = []
        for place, ids in enumerate(prompts):
            sampling = self._sampling(body, len(ids))
            text = texts[place] if texts and (body.echoes or parser) else ""
            prompt = Prompt(prompt_id=place, token_ids=np.array(ids, dtype=np.int64), text=text)
            first, seen[tuple(ids)] = seen[tuple(ids)], seen[tuple(ids)] + body.n
            for number in range(first, first + body.n):
                requests.append(
                    SampleRequest(
                        key=sample_key(seed, ids, number),
                        prompt=prompt,
                        sampling=sampling,
                        group_id=place,
                        num_top=body.num_top if body.most_tokens == 0 else None,
                    )
                )
            self._require_fits(requests[-1])
        short = parser is not None and "length != 9" in (own_template(self._tokenizer, tools=({},)) or "")
        return Asked(
            body=body, seed=seed, requests=requests, parser=parser, forced=forced, has_short_ids=short
        )

    def require_served(self, name: str) -> None:
        """Raise ApiError for another model's name."""
        if name != self._served_name:
            raise ApiError(
                404,
                f"the model '{cut(name)}' is not here; served is '{self._served_name}'",
                param="model",
                code="model_not_found",
            )

    def _prompts(self, body: CompletionBody) -> tuple[list[list[int]], list[str]]:
        """Token ids of each prompt, and the texts where they are texts."""
        given = body.prompt
        if isinstance(given, str):
            given = [given]
        elif given and isinstance(given[0], int):
            given = [given]  # type: ignore[list-item]  # a list of token ids
        if not given:
            raise refuse("prompt must be a text, token ids, or a list of either, got an empty list", "prompt")
        texts = [one for one in given if isinstance(one, str)]
        for text in texts:
            _as_api_error(partial(require_whole_text, text, "prompt"), "prompt")
        ids = iter(prompt_ids(self._tokenizer, texts))
        prompts = [next(ids) if isinstance(one, str) else list(one) for one in given]  # type: ignore[arg-type]
        largest = max((token for prompt in prompts for token in prompt), default=0, key=abs)
        if abs(largest) >= 2**63:
            raise refuse(f"prompt: token ids are from 0 to {self._vocab_size - 1}, got {largest}", "prompt")
        return prompts, texts

    def _chat_text(self, body: ChatBody) -> tuple[str, str]:
        """What the template writes, and the beginning of a call where one must follow."""
        turns = _as_api_error(lambda: parse_turns(body.messages, "messages"), "messages")
        if not turns:
            raise refuse("messages must hold one message at least, got an empty list", "messages")
        template = own_template(self._tokenizer, tools=body.tools)
        if template is None:
            raise refuse(
                f"{no_template(self._tokenizer)}; ask /v1/completions with a whole prompt", "messages"
            )
        variables = body.chat_template_kwargs
        read = template_variables(template) - set(surface("request.chat_template_kwargs").refused)
        require_known(variables, "request.chat_template_kwargs", "chat_template_kwargs", also=read)

        def render(turns: Sequence[Turn], tools: Tools, ask: bool = body.add_generation_prompt) -> str:
            return render_chat(self._tokenizer, turns, ask=ask, tools=tools, variables=variables)

        try:
            text = render(turns, body.tools)
        except Exception as error:  # a template is a program, and not ours
            said = " ".join(str(error).split())[:200]
            raise refuse(
                f"the chat template refuses it: {type(error).__name__}: {said}", "messages"
            ) from None
        key = "chat_template.jinja of the model's folder"
        _as_api_error(
            partial(require_written, render, turns, body.tools, text=text, origin="messages", key=key),
            "messages",
        )
        names = [{key: held for key, held in turn.items() if key != "name"} for turn in turns]
        if names != turns and render(names, body.tools) == text:
            note_once("messages: the chat template does not write their `name`; say in `content` who speaks")
        is_forced = body.tool_choice == "required" or body.forced_tool is not None
        return text, self._call_begin(body, partial(render, ask=False), turns, text) if is_forced else ""

    def _call_begin(
        self, body: ChatBody, render: Callable[..., str], turns: Sequence[Turn], text: str
    ) -> str:
        """A call as the template writes it, up to the name, or of a named function up to its arguments.

        Raises ApiError where the template writes none behind `text` that would be read.
        """
        name = body.forced_tool
        arguments: tuple[dict[str, str], ...] = ({}, {"a": "b"}) if name else ({"a": "b"},) * 2
        written = []
        for one, given in zip((name, name) if name else ("f", "g"), arguments, strict=True):
            # a template of Mistral's wants nine characters
            call = {"type": "function", "id": "call00000", "function": {"name": one, "arguments": given}}
            with suppress(Exception):  # a template is a program, and not ours
                written.append(
                    render([*turns, {"role": "assistant", "content": "", "tool_calls": [call]}], body.tools)
                )
        begin = written[0][: num_shared(*written)] if len(written) == 2 else ""
        tail = written[-1][len(text) :] if begin.startswith(text) else ""
        if [one.name for one in self._call_parser.parse(tail, prompt=text).calls] != [name or "g"]:
            raise refuse(
                f"tool_choice {quote(body.tool_choice)}: the chat template writes no call right behind its prompt "
                "that a response could go on from; send 'auto'",
                "tool_choice",
            )
        # up to where a token of the model's own begins
        return begin[len(text) :].rstrip(' \n"{<')

    def _sampling(self, body: GenerationBody, num_prompt_tokens: int) -> SamplingParams:
        room = self._max_total_tokens - num_prompt_tokens
        if body.most_tokens is None and room < 1:
            raise refuse(
                f"the prompt has {num_prompt_tokens} tokens, and prompt and response have room for "
                f"{self._max_total_tokens} together; shorten it",
                "messages",
            )
        if len(body.stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in body.stops):
            raise refuse(
                f"stop may name {MAX_STOPS} texts of {MAX_STOP_CHARS} characters, got {len(body.stops)} of up to "
                f"{max(map(len, body.stops))}",
                "stop",
            )
        known = self._chat_ends if isinstance(body, ChatBody) else self._ends
        ends = () if body.ignore_eos else known
        return _as_api_error(
            lambda: SamplingParams(
                temperature=self._usual.get("temperature", 1.0)
                if body.temperature is None
                else body.temperature,
                top_k=max(self._usual.get("top_k", 0) if body.top_k is None else body.top_k, 0),
                top_p=self._usual.get("top_p", 1.0) if body.top_p is None else body.top_p,
                min_p=self._usual.get("min_p", 0.0) if body.min_p is None else body.min_p,
                max_new_tokens=min(self._usual.get("max_new_tokens", room), room)
                if body.most_tokens is None
                # of a prompt that is scored alone, too: nothing is decoded then
                else max(body.most_tokens, 1),
                stop_token_ids=tuple(dict.fromkeys((*ends, *body.stop_token_ids))),
                stop=body.stops,
            )
        )

    @cached_property
    def _call_parser(self) -> CallParser:
        return CallParser(self._tokenizer)

    @cached_property
    def _chat_ends(self) -> tuple[int, ...]:
        closing = turn_end(self._tokenizer, DataConfig(task="chain"))
        return self._ends if closing is None else tuple(dict.fromkeys((*self._ends, closing)))

    def _require_fits(self, request: SampleRequest) -> None:
        _as_api_error(
            lambda: require_can_be_sampled(
                request, vocab_size=self._vocab_size, max_total_tokens=self._max_total_tokens
            ),
            "prompt",
        )


def _as_api_error(call: Callable[[], _T], param: str | None = None) -> _T:
    """What a call returns; what it refuses as bad input is refused with 400."""
    try:
        return call()
    except InputError as error:
        text = str(error).replace("sampling.max_new_tokens", "max_tokens").replace("sampling.", "")
        text = text.replace(
            "set data.chat_template", "send tool_choice 'none', or serve it with such a template"
        )
        raise refuse(text, param) from None
