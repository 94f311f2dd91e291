"""What ends a response: the tokenizer's and the model's end tokens, and what closes a turn of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ....core.config import DataConfig
from ....core.errors import ConfigError
from ....engine.decoding.stop_strings import StopStrings
from ....engine.weights.generation_settings import as_ids, config_end_tokens, load_generation_settings
from ....engine.weights.loading import num_token_ids
from ..prompt_tokens import encode_texts, read_template
from .chat_format import own_template, render_chat
from .messages import Turn

_SAID = "what-the-assistant-said"
_ASKED: Turn = {"role": "user", "content": "-"}
_ANSWERED: Turn = {"role": "assistant", "content": _SAID}


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Ids that end a response beside sampling.stop_token_ids, and what a user should know of them."""

    token_ids: tuple[int, ...]
    line: str | None = None


def find_end_tokens(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: str,
    is_chat: bool,
    stop_token_ids: Sequence[int] = (),
) -> EndTokens:
    """What ends the responses to prompts of `data`, which `is_chat` says are conversations.

    A template may close turns with a token that neither tokenizer nor model names: it is found by rendering a turn.
    Raises DataError for a template that cannot be read, ModelError for a generation_config.json that cannot.
    """
    known, num_ids = model_end_tokens(tokenizer, model), num_token_ids(tokenizer)
    lines = [
        f"the model ends responses at id {token}, and the tokenizer has {num_ids} ids: is it this model's?"
        for token in generation_end_tokens(model)
        if token >= num_ids
    ][:1]
    closing = turn_end(tokenizer, data) if is_chat else None
    if is_chat and closing is None:
        named = ", ".join(str(tokenizer.convert_ids_to_tokens(one)) for one in (*known, *stop_token_ids))
        lines.append(
            f"the chat template closes an answer with no token of its own: {named or 'nothing'} ends a response"
        )
    elif closing is not None and closing not in (*known, *stop_token_ids):
        known = (*known, closing)
        lines.append(
            f"responses also end at {tokenizer.convert_ids_to_tokens(closing)} (id {closing}), with which the chat "
            "template closes a turn; neither tokenizer nor model names it (sampling.end_token_ids says otherwise)"
        )
    return EndTokens(known, " ".join(lines) or None)


def model_end_tokens(tokenizer: PreTrainedTokenizerBase, model: str | None) -> tuple[int, ...]:
    """Those of the tokenizer and of a model's (path or hub name) generation_config.json, else of its config.json.

    Raises ModelError: generation_config.json is there and cannot be read.
    """
    eos = tokenizer.eos_token_id
    known = [eos] if isinstance(eos, int) else []
    if model is not None:
        num_ids = num_token_ids(tokenizer)
        known += [token for token in generation_end_tokens(model) if 0 <= token < num_ids]
    return tuple(dict.fromkeys(known))


def generation_end_tokens(model: str) -> list[int]:
    """Ids that a model's generation_config.json ends a response with, without such a file its config.json.

    Raises ModelError: generation_config.json is there and cannot be read.
    """
    settings = load_generation_settings(model)
    return config_end_tokens(model) if settings is None else as_ids(settings.eos_token_id)


def stop_strings(tokenizer: PreTrainedTokenizerBase, *, hides_special: bool = False) -> StopStrings:
    """What an engine finds `sampling.stop` with. `hides_special`: readers see no special tokens, as a server's.

    Raises ConfigError for a tokenizer that is written in Python alone.
    """
    decoder = getattr(tokenizer, "backend_tokenizer", None)
    if decoder is None:
        raise ConfigError(
            f"sampling.stop reads texts as they are sampled and needs a fast tokenizer (tokenizer.json), got "
            f"{type(tokenizer).__name__}; save one with the model, or set sampling.stop_token_ids instead"
        )
    return StopStrings(decoder, num_token_ids(tokenizer), hides_special=hides_special)


def turn_end(tokenizer: PreTrainedTokenizerBase, data: DataConfig | None = None) -> int | None:
    """The special token with which the chat template of `data`, else the tokenizer's, closes an answer; None: none.

    Where an answer that is last is left open, what begins the user's next turn ends it.
    """
    template = read_template(data and data.chat_template, tokenizer) or own_template(tokenizer)
    variables = data and data.chat_template_kwargs
    if template is None:
        return None
    known: Any = tokenizer  # such as <|im_end|> that was added and not called special
    special = {*tokenizer.all_special_ids, *known.get_added_vocab().values()}
    for turns in ([_ASKED, _ANSWERED], [_ASKED, _ANSWERED, _ASKED]):
        try:
            text = render_chat(tokenizer, turns, ask=False, template=template, variables=variables)
        except Exception:  # what it refuses is said where prompts are rendered
            return None
        place = text.rfind(_SAID)
        (behind,) = (
            encode_texts(tokenizer, [text[place + len(_SAID) :]], special=False) if place >= 0 else [[]]
        )
        first = next(
            (token for token in behind if token in special or str(tokenizer.decode([token])).strip()), None
        )
        if first in special and first != tokenizer.bos_token_id:
            return first
    return None
