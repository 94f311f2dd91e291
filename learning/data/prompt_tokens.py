"""Turns rows into the text that the model sees, by template or chat template, and that into token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...core.config import DataConfig
from ...core.errors import DataError
from ...core.outside import cut, is_file
from .chat.chat_format import named_template, no_template, own_template, render_chat, require_written
from .chat.messages import Messages, Turn, pairs_of
from .chat.template_variables import require_variables
from .chat.written_text import text_prefill, turn_beginning
from .prompt_rows import Row


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the model sees it."""

    text: str
    plain: str = ""
    "the question with data.prompt_template around it, without a chat template; empty of conversations"
    turns: tuple[Turn, ...] = ()
    "the messages that the chat template was given, whole; empty for plain text"
    prefill: str = ""
    "what the text begins the assistant's turn with, such as `<think>`"
    for_teacher: str | None = None
    "the text that a teacher reads in its place"

    @property
    def messages(self) -> Messages:
        """Role and content of the turns."""
        return pairs_of(self.turns)


class PromptEncoder:
    """Renders and tokenises the prompts of one source. Raises DataError for templates that cannot be used."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._prefills: dict[str, str] = {}
        "by the text of a chat template"
        self.notes = dict[str, None]()
        "what of messages nothing reads"
        self.unbegun_heads: dict[str, None] = {}
        "heads of the assistant's turn that a template leaves to the response"
        self._template = read_template(data.chat_template, tokenizer)
        # a generated task's prompt is all that the small model has been trained on
        self._adds_special_tokens = data.task is None

    def render(self, row: Row) -> Rendered:
        """Apply the templates; without a tokenizer a conversation is shown as its turns.

        Raises DataError: no chat template, or one that refuses the turns.
        """
        if row.filled_for_teacher is not None:
            of_teacher = self.render(replace(row, filled=row.filled_for_teacher, filled_for_teacher=None))
            return replace(self.render(replace(row, filled_for_teacher=None)), for_teacher=of_teacher.text)
        data = self._data
        if row.turns:
            *history, last = row.turns
            return self._chat(row, (*history, {**last, "content": row.filled}))
        if data.chat:
            return replace(self._chat(row, ({"role": "user", "content": row.filled},)), plain=row.filled)
        if data.system_prompt is not None:
            raise DataError(
                f"{row.origin}: data.system_prompt needs a conversation, got plain text; set data.chat to true, or "
                "write it into data.prompt_template"
            )
        prefill = text_prefill(data.prompt_template) if data.task is None else ""
        return Rendered(row.filled, plain=row.filled, prefill=prefill)

    def token_ids(self, prompts: Sequence[Rendered]) -> list[list[int]]:
        """Tokenise many at once, which fast tokenizers do in parallel; of a source all are conversations, or none."""
        assert self._tokenizer is not None
        texts = [prompt.text for prompt in prompts]
        # a chat template writes the special tokens itself
        if self._adds_special_tokens and not any(prompt.turns for prompt in prompts):
            return prompt_ids(self._tokenizer, texts)
        return encode_texts(self._tokenizer, texts, special=False)

    def teacher_ids(self, prompts: Sequence[Rendered]) -> list[tuple[int, ...]]:
        """The same of what a teacher reads; empty where it reads nothing else."""
        of_teacher = [replace(prompt, text=prompt.for_teacher or "") for prompt in prompts]
        if not any(prompt.text for prompt in of_teacher):
            return [()] * len(prompts)
        return [tuple(ids) for ids in self.token_ids(of_teacher)]

    def _chat(self, row: Row, turns: tuple[Turn, ...]) -> Rendered:
        system = self._data.system_prompt
        if system is not None and turns[0]["role"] not in ("system", "developer"):
            turns = ({"role": "system", "content": system}, *turns)
        tokenizer, variables = self._tokenizer, self._data.chat_template_kwargs
        if tokenizer is None:
            return Rendered("\n".join(f"{role}: {content}" for role, content in pairs_of(turns)), turns=turns)
        template = self._template or own_template(tokenizer, tools=row.tools)
        if template is None:
            asked = "data.chat is true" if not row.turns else f"{row.origin} is a conversation"
            raise DataError(
                f"{asked} but {no_template(tokenizer)}; name one by data.chat_template, set data.chat to "
                "false for plain text, or models.tokenizer to one that has a template"
            )
        note = self.notes.setdefault
        require_variables(template, variables, known=tokenizer.special_tokens_map, note=note)
        render = partial(render_chat, tokenizer, ask=True, template=template, variables=variables)
        try:
            text = render(turns, tools=row.tools)
        except Exception as error:  # a template is a program, and not ours
            said = " ".join(str(error).split())[:200]
            roles = cut(", ".join(turn["role"] for turn in turns))
            raise DataError(
                f"{row.origin}: the chat template refuses its turns ({roles}): {type(error).__name__}: {said}; "
                f"{_advice(row, turns)}"
            ) from error
        require_written(
            render,
            turns,
            row.tools,
            text=text,
            template=template,
            origin=row.origin,
            key="data.chat_template",
            note=note,
        )
        prefill = self._prefill(tokenizer, template)
        return Rendered(text, turns=turns, prefill=prefill if text.endswith(prefill) else "")

    def _prefill(self, tokenizer: PreTrainedTokenizerBase, template: str) -> str:
        if template not in self._prefills:
            variables = self._data.chat_template_kwargs
            render = partial(render_chat, tokenizer, template=template, variables=variables)
            self._prefills[template], head = turn_beginning(render, template)
            if head:
                self.unbegun_heads[head] = None
        return self._prefills[template]


def _advice(row: Row, turns: Sequence[Turn]) -> str:
    if turns[0]["role"] not in ("system", "developer"):
        return "fix the row, leave it out by data.filter, or name another template by data.chat_template"
    if row.turns and row.turns[0]["role"] == turns[0]["role"]:
        return "where it knows no system turn, name another by data.chat_template, or leave the row out by data.filter"
    return "where it knows no system turn, take out data.system_prompt or name another by data.chat_template"


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[list[int]]:
    """Token ids of each text, with the tokenizer's own special tokens or without."""
    if not texts:
        return []
    encoded: Any = tokenizer(
        texts,
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [list(ids) for ids in encoded["input_ids"]]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of plain prompts: with what the tokenizer puts before a text, once, and not what it puts behind.

    A response follows, so an end token there would end it before it begins.
    """
    if not texts:
        return []
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    num_more = len(whole) - len(bare)
    before = next(
        (place for place in range(num_more + 1) if whole[place : place + len(bare)] == bare), num_more
    )
    out = []
    for ids in encode_texts(tokenizer, texts, special=True):
        ids = ids[: len(ids) - (num_more - before)]
        # a text that was rendered elsewhere begins with the token already
        doubled = before == 1 and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id
        out.append(ids[1:] if doubled else ids)
    return out


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token; of byte-level BPE its bytes, which are at least as many."""
    return max(len(token) for token in tokenizer.get_vocab())


def read_template(given: str | None, tokenizer: PreTrainedTokenizerBase | None = None) -> str | None:
    """Return the Jinja text that data.chat_template names or is, or the tokenizer has by that name.

    Raises DataError.
    """
    if given is None or "{" in given:
        return given
    if (text := named_template(tokenizer, given)) is not None:
        return text
    path = Path(given).expanduser()
    if not is_file(path):
        named = tokenizer.chat_template if tokenizer is not None else None
        names = f"; the tokenizer has {cut(', '.join(sorted(named)))}" if isinstance(named, dict) else ""
        raise DataError(
            "data.chat_template: expected a Jinja file, the template itself or the name of one of the tokenizer's "
            f"templates, and there is no file {cut(given)}{names}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read data.chat_template {path}: {error}; save it as UTF-8") from error
    return text if path.suffix.lower() != ".json" else _template_in(text, path)


def _template_in(text: str, path: Path) -> str:
    """The template in a processor's chat_template.json, or in a tokenizer_config.json."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    template = found.get("chat_template") if isinstance(found, dict) else None
    if not isinstance(template, str):
        raise DataError(
            f"cannot read data.chat_template {path}: expected a Jinja file, or JSON whose chat_template is one "
            "template's text; write the template into a file of its own"
        )
    return template
