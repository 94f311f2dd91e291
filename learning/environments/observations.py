"""How an environment's answers become tokens: what is new is rendered, what was sampled is never tokenised again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from ...core.errors import ConfigError, EpisodeError
from ...core.records import Prompt
from ...engine.weights.loading import num_token_ids
from ..data.chat.chat_format import as_template_reads, no_template, own_template, render_chat
from ..data.chat.messages import Messages, Tools, Turn, as_dicts, pairs_of
from .environment_protocol import Message, Observation

_SAID = "what-the-policy-said"
"Stands for a turn's text where the template renders what follows it."
_KEPT_NAMES = 256
_MOST_CHARACTERS = 256
"Of a token: the longest of known vocabularies have 128."


@dataclass(frozen=True, slots=True)
class Given:
    """An answer as the policy reads it."""

    token_ids: Int[np.ndarray, " T"]
    messages: Messages = ()
    "(role, content) of the turns that it makes; what goes on in the policy's own turn is the assistant's"


class ObservationRenderer:
    """Renders observations for one tokenizer; counts those that were cut."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        raw: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """A renderer.

        Args:
            tokenizer: of the policy.
            max_tokens: of one answer; more is cut off.
            raw: in a chat too, a text goes on where the policy stopped; else it is the user's next message.
            chat_template: the Jinja text that rendered the prompts; None: the tokenizer's.
            chat_template_kwargs: its further variables.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._raw = raw
        self._template = chat_template
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._num_ids = num_token_ids(tokenizer)
        self._behind_a_call: dict[tuple[str, bool], tuple[Sequence[Turn], str | None]] = {}
        self._ending_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.num_cut = 0

    def give(self, observation: Observation, *, prompt: Prompt, last_token: int) -> Given:
        """Return what stands between a turn that ended with `last_token` and the next one.

        Texts follow as they are behind a prompt without messages. Raises EpisodeError for token ids that the tokenizer
        does not know and messages that cannot be rendered.
        """
        if isinstance(observation, str):
            if not observation:
                return Given(np.zeros(0, dtype=np.int64))
            if self._raw or not prompt.messages:
                return self._further(self._first(observation))
            observation = [{"role": "user", "content": observation}]
        if len(observation) and isinstance(observation[0], dict):
            return self._turns(observation, last_token, prompt.tools)  # type: ignore[arg-type]
        ids = self._cut([int(one) for one in observation])  # type: ignore[arg-type]
        if ids and not 0 <= min(ids) <= max(ids) < self._num_ids:
            raise EpisodeError(
                f"expected token ids from 0 to {self._num_ids - 1}, the tokenizer's, got {min(ids)} to {max(ids)}"
            )
        return self._further(ids)

    def with_text(self, prompt: Prompt, text: str) -> Prompt:
        """Return the prompt with an environment's first words: at its end, in a chat at the end of its last message.

        Raises EpisodeError where the chat template refuses the longer message.
        """
        ids = self._first(text)
        if not prompt.messages:
            token_ids = np.concatenate([prompt.token_ids, np.array(ids, dtype=np.int64)])
            return replace(prompt, token_ids=token_ids, text=prompt.text + text)
        shown = self._decode(ids)
        *earlier, last = prompt.conversation
        turns = (*earlier, {**last, "content": last["content"] + shown})
        longer = self._encode(self._render(turns, prompt.tools))
        return replace(
            prompt,
            token_ids=np.array(longer, dtype=np.int64),
            text=prompt.text + shown,
            messages=pairs_of(turns),
            turns=turns if prompt.turns else (),
        )

    def _first(self, text: str) -> list[int]:
        # what is far behind the cut is not read: a tool may return a file
        return self._cut(self._encode(text[: self._max_tokens * _MOST_CHARACTERS]))

    def _further(self, ids: list[int]) -> Given:
        return Given(np.array(ids, dtype=np.int64), (("assistant", self._decode(ids)),) if ids else ())

    def _turns(self, observation: Sequence[Message], last_token: int, tools: Tools) -> Given:
        shown = [{**one, "content": self._decode(self._first(one["content"]))} for one in observation]
        rest = (
            self._behind_calls(shown, last_token, tools)
            if all("tool_call_id" in one for one in shown)
            else self._behind_text(shown, last_token, tools)
        )
        turns = tuple((one["role"], one["content"]) for one in shown)
        return Given(np.array(self._encode(rest), dtype=np.int64), turns)

    def _behind_text(self, shown: Sequence[Turn], last_token: int, tools: Tools) -> str:
        whole = self._render([*as_dicts((("user", "-"), ("assistant", _SAID))), *shown], tools)
        said_at = whole.rfind(_SAID)
        if said_at < 0:
            raise EpisodeError("the chat template does not show what the policy said before the observation")
        rest = whole[said_at + len(_SAID) :]
        if last_token in self._tokenizer.all_special_ids:
            # the policy has closed its message itself
            rest = rest.removeprefix(self._decode([last_token]))
        return rest

    def _behind_calls(self, results: Sequence[Turn], last_token: int, tools: Tools) -> str:
        """What a template writes for results of calls, which some refuse to show behind anything but calls."""
        # one call: some templates know no more of a turn
        function = {"name": results[0]["name"], "arguments": {"a": _SAID}}
        call = {"type": "function", "id": results[0]["tool_call_id"], "function": function}
        asked = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        kind = results[0]["name"], bool(tools)
        if kind not in self._behind_a_call:  # what stands there is the template's, and no tool's
            if len(self._behind_a_call) >= _KEPT_NAMES:  # a policy may make up names
                self._behind_a_call.clear()
            read = as_template_reads(partial(self._render, tools=tools, as_given=True), [*asked, *results])
            behind = _behind_said(self._render(asked, tools, ask=False))
            self._behind_a_call[kind] = read[: len(asked)], behind
        asked, own = self._behind_a_call[kind]
        rest = _behind_said(self._render([*asked, *results], tools, as_given=True))
        if own is None or rest is None or not rest.startswith(own):
            raise EpisodeError("the chat template leaves out calls, or what follows them")
        end = self._decode([last_token]) if last_token in self._ending_ids else ""
        if end and end in own:
            return rest[own.rfind(end) + len(end) :]
        # a turn that was cut is closed as the template closes it
        ends = (self._decode([token]) for token in self._tokenizer.all_special_ids)
        at = max((own.rfind(one) for one in ends if one), default=-1)
        return (own[at:] if at >= 0 else "") + rest[len(own) :].removeprefix(end)

    def require_tools(self, tools: Tools) -> None:
        """Raise ConfigError for a chat template that cannot show the tools, calls of them, or what they return."""
        name, result = tools[0]["function"]["name"], "what-the-tool-returned"
        message = {"role": "tool", "name": name, "tool_call_id": "call00000", "content": result}
        try:
            is_shown = name in self._render(as_dicts((("user", "-"),)), tools)
            shown = self._behind_calls([message], 0, tools)
            fault = "" if is_shown and result in shown else "it leaves out the tools or what they return"
        except EpisodeError as error:
            fault = str(error)
        if fault:
            raise ConfigError(
                f"environment.kind tools: the chat template cannot show tools: {fault}; expected one that writes "
                "tools, calls and tool turns; name one by data.chat_template"
            )

    def _render(
        self, messages: Sequence[Turn], tools: Tools = (), *, ask: bool = True, as_given: bool = False
    ) -> str:
        if self._template is None and own_template(self._tokenizer, tools=tools) is None:
            raise EpisodeError(f"there are messages to show, and {no_template(self._tokenizer)}")
        try:
            return render_chat(
                self._tokenizer,
                messages,
                ask=ask,
                tools=tools,
                template=self._template,
                variables=self._template_kwargs,
                as_given=as_given,
            )
        except Exception as error:  # templates raise what they like
            raise EpisodeError(f"the chat template cannot show the messages {messages}: {error}") from error

    def _cut(self, ids: list[int]) -> list[int]:
        self.num_cut += len(ids) > self._max_tokens
        return ids[: self._max_tokens]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        return _text(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _behind_said(text: str) -> str | None:
    """What stands behind the policy's words; None where they are not there."""
    said_at = text.rfind(_SAID)
    return text[said_at + len(_SAID) :] if said_at >= 0 else None


def ending_with(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> tuple[int, ...]:
    """Return the ids of all tokens whose text ends with one of `texts`."""
    wanted = tuple(texts)
    if not wanted:
        return ()
    words = ((number, _text(tokenizer.decode([number]))) for number in range(num_token_ids(tokenizer)))
    return tuple(number for number, word in words if word.endswith(wanted))


def _text(decoded: str | list[str]) -> str:
    return decoded if isinstance(decoded, str) else "".join(decoded)
