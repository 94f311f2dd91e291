"""How an environment's answers become tokens: what is new is rendered, what was sampled is never tokenised again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from core.errors import EpisodeError
from core.records import Prompt
from engine.weights.loading import num_token_ids
from learning.environments.environment_protocol import Message, Observation

_SAID = "what-the-policy-said"
"Stands for a turn's text where the template renders what follows it."


class ObservationRenderer:
    """Renders observations for one tokenizer; counts those that were cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool, max_tokens: int) -> None:
        """`chat`: texts are messages of the user, in the tokenizer's chat template; else they follow as they are."""
        self._tokenizer = tokenizer
        self._chat = chat
        self._max_tokens = max_tokens
        self._num_ids = num_token_ids(tokenizer)
        self.num_cut = 0

    def tokens(self, observation: Observation, *, last_token: int) -> Int[np.ndarray, " T"]:
        """Return the tokens between a turn that ended with `last_token` and the next one.

        Raises EpisodeError for token ids that the tokenizer does not know and messages that cannot be rendered.
        """
        if isinstance(observation, str):
            if not observation:
                return np.zeros(0, dtype=np.int64)
            if not self._chat:
                return np.array(self._cut(self._encode(observation)), dtype=np.int64)
            observation = [{"role": "user", "content": observation}]
        if len(observation) and isinstance(observation[0], dict):
            return self._messages(observation, last_token)  # type: ignore[arg-type]
        ids = np.array(self._cut([int(one) for one in observation]), dtype=np.int64)  # type: ignore[arg-type]
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._num_ids:
            raise EpisodeError(
                f"expected token ids from 0 to {self._num_ids - 1}, the tokenizer's, got {ids.min()} to {ids.max()}"
            )
        return ids

    def with_text(self, prompt: Prompt, text: str) -> Prompt:
        """Return the prompt with an environment's first words: at its end, in a chat at the end of its last message.

        Raises EpisodeError where the message cannot be found in the rendered prompt.
        """
        ids = self._cut(self._encode(text))
        if not self._chat:
            token_ids = np.concatenate([prompt.token_ids, np.array(ids, dtype=np.int64)])
            return replace(prompt, token_ids=token_ids, text=prompt.text + text)
        rendered = self._decode(prompt.token_ids.tolist())
        at = rendered.rfind(prompt.text)
        if not prompt.text or at < 0:
            raise EpisodeError(
                "reset returned text, but the chat template does not show the prompt's own text"
            )
        at += len(prompt.text)
        longer = self._encode(rendered[:at] + self._decode(ids) + rendered[at:])
        return replace(prompt, token_ids=np.array(longer, dtype=np.int64), text=prompt.text + text)

    def _messages(self, messages: Sequence[Message], last_token: int) -> Int[np.ndarray, " T"]:
        if self._tokenizer.chat_template is None:
            raise EpisodeError(
                "the observation is a list of messages, and the tokenizer has no chat template"
            )
        shown = [
            {**one, "content": self._decode(self._cut(self._encode(one["content"])))} for one in messages
        ]
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SAID}]
        try:
            whole: Any = self._tokenizer.apply_chat_template(
                [*before, *shown], add_generation_prompt=True, tokenize=False
            )
            said_at = whole.rindex(_SAID)
        except Exception as error:  # templates raise what they like
            raise EpisodeError(f"the chat template cannot show the messages {shown}: {error}") from error
        rest = whole[said_at + len(_SAID) :]
        if last_token in self._tokenizer.all_special_ids:
            # the policy has closed its message itself
            rest = rest.removeprefix(self._decode([last_token]))
        return np.array(self._encode(rest), dtype=np.int64)

    def _cut(self, ids: list[int]) -> list[int]:
        self.num_cut += len(ids) > self._max_tokens
        return ids[: self._max_tokens]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        return _text(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def turn_text(tokenizer: PreTrainedTokenizerBase, ids: Int[np.ndarray, " T"]) -> str:
    """Return what an environment reads of a turn: its text without special tokens."""
    return _text(tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def ending_with(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> tuple[int, ...]:
    """Return the ids of all tokens whose text ends with one of `texts`."""
    wanted = tuple(texts)
    if not wanted:
        return ()
    words = ((number, _text(tokenizer.decode([number]))) for number in range(num_token_ids(tokenizer)))
    return tuple(number for number, word in words if word.endswith(wanted))


def _text(decoded: str | list[str]) -> str:
    return decoded if isinstance(decoded, str) else "".join(decoded)
