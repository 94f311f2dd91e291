"""What a reward model reads: prompt and response as its tokenizer's chat template writes them, as token ids."""

from __future__ import annotations

from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from learning.rewards.score_request import ScoreRequest


class ModelText:
    """Token ids of a scored response: from the left cut to what the model holds, the response never."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens

    def token_ids(self, request: ScoreRequest) -> list[int]:
        """The ids of one request. Raises ValueError: no place for the response, or what the template refuses."""
        text, before = self._texts(request)
        ids = self._encode(text, request)
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return ids
        # the response begins where the prompt alone ends
        num_response = len(ids) - len(self._encode(before, request))
        first = self._leading(ids)
        if num_response + len(first) > self.max_tokens:
            raise ValueError(
                f"the response has {num_response} tokens and the reward model reads {self.max_tokens}; lower "
                "sampling.max_new_tokens, or raise reward.max_tokens where the model allows it"
            )
        return first + ids[len(ids) - self.max_tokens + len(first) :]

    def _is_chat(self, request: ScoreRequest) -> bool:
        return bool(request.prompt.messages) and self._tokenizer.chat_template is not None

    def _texts(self, request: ScoreRequest) -> tuple[str, str]:
        """The whole text, and the part of it before the response."""
        if not self._is_chat(request):
            return request.prompt.text + request.response, request.prompt.text
        messages: list[dict[str, str]] = [
            {"role": role, "content": content} for role, content in request.prompt.messages
        ]
        answer = {"role": "assistant", "content": request.response}
        try:
            whole: Any = self._tokenizer.apply_chat_template([*messages, answer], tokenize=False)
            before: Any = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs: they raise what they like
            raise ValueError(f"the reward model's chat template refuses the chat: {error}") from error
        return whole, before

    def _encode(self, text: str, request: ScoreRequest) -> list[int]:
        # a template writes its special tokens itself
        return self._tokenizer(text, add_special_tokens=not self._is_chat(request), truncation=False)[
            "input_ids"
        ]

    def _leading(self, ids: list[int]) -> list[int]:
        """The token that every text of the model begins with, if there is one: it is kept."""
        begin = (self._tokenizer.bos_token_id, self._tokenizer.cls_token_id)
        return ids[:1] if ids and ids[0] in begin else []
