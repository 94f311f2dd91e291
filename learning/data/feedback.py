"""Rows for direct preference optimisation: two responses to a prompt, or one that is desirable or not.

Formats are those of TRL: pairs as for `train-reward`; `prompt`, `completion` and `label`. Their tokens are those that
`sft` would learn, so that a response ends as it is to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...core.errors import DataError
from ...core.outside import quote
from ...core.settings.supervised import FeedbackConfig
from .chat.chat_masks import require_once
from .preferences import pair_texts, require_different
from .record import Record
from .supervised_rows import Demonstration, ExampleMaker, Note, is_unpaired, plain_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What was said of a response to a prompt, or of two."""

    responses: tuple[Demonstration, ...]
    "behind their prompt; of a pair the chosen one and the rejected one"
    is_chosen: tuple[bool, ...]
    unrelated: tuple[Demonstration, ...] = ()
    "of kto: responses to another prompt, behind this one"
    reference: tuple[float, ...] = ()
    "the reference model's log-probabilities of the responses, then of the unrelated ones, in nats"

    @property
    def sequences(self) -> tuple[np.ndarray, ...]:
        """What is computed of it."""
        return tuple(one.token_ids for one in self.responses)

    @property
    def num_tokens(self) -> int:
        """Of the responses, with their prompts."""
        return sum(one.num_tokens for one in self.responses)

    @property
    def identity(self) -> bytes:
        """Equal for equal feedback alone."""
        return bytes(self.is_chosen) + b"".join(one.identity for one in (*self.responses, *self.unrelated))


def encode_feedback(
    rows: Sequence[Record],
    data: FeedbackConfig,
    tokenizer: PreTrainedTokenizerBase,
    note: Note | None = None,
    *,
    takes_unpaired: bool,
) -> tuple[list[Feedback], int]:
    """Every row as feedback, and how many were left out: too long, or cut to nothing, or to two equal responses.

    `note` hears of keys that nothing reads. Raises DataError naming the row, as `encode_preferences`; a row of one
    response where pairs are wanted, a label that is neither true nor false.
    """
    found: list[Feedback] = []
    maker = ExampleMaker(data, tokenizer, note)
    for row in rows:
        if is_unpaired(row, data):
            is_chosen: tuple[bool, ...] = (_label(row, data, takes_unpaired=takes_unpaired),)
            whole = [maker.tokens(row)]
        else:
            is_chosen = (True, False)
            prompt, turns, responses, tools = pair_texts(row, data, tokenizer, note)
            whole = []
            for response in responses:
                if turns:
                    said = (
                        {"role": "assistant", "content": response} if isinstance(response, str) else response
                    )
                    talk, first = [*turns, said], len(turns)
                    whole.append(
                        maker.of_conversation(talk, origin=row.origin, first_turn=first, tools=tools)
                    )
                else:
                    require_once(prompt, str(response), row.origin)
                    whole.append(plain_tokens(prompt, str(response), tokenizer))
            require_different(whole[0][0], whole[1][0], row.origin)
        made = [maker.fitting(*one, row) for one in whole]
        fitting = tuple(one for one in made if one is not None)
        if len({one.token_ids.tobytes() for one in fitting}) == len(is_chosen):
            found.append(Feedback(responses=fitting, is_chosen=is_chosen))
    if not found:
        raise DataError(
            f"no row left of {len(rows)}: all are too long for data.max_tokens {data.token_limit}, or have no token to "
            "learn within it; raise it, or fix the rows"
        )
    maker.tell("the responses")
    return found, len(rows) - len(found)


def with_unrelated(items: Sequence[Feedback], among: Sequence[Feedback], max_tokens: int) -> list[Feedback]:
    """Each item with the responses of the one before it in `among` that has another prompt, by which KTO estimates KL.

    TRL pairs the rows of a batch so; here partners are fixed, so that the reference's values are too.
    Source: Ethayarajh et al. 2024, 'KTO', section 4.1 (mismatched outputs in the place of samples of the policy).
    Raises DataError: there is one prompt alone.
    """
    prompts = [_prompt(one.responses[0]).tobytes() for one in among]
    found = []
    for index, item in enumerate(items):
        prompt = _prompt(item.responses[0])
        before = ((index - back) % len(among) for back in range(1, len(among) + 1))
        other = next((among[at] for at in before if prompts[at] != prompt.tobytes()), None)
        if other is None:
            raise DataError(
                "loss.type kto estimates its KL by responses to other prompts, and all rows to learn from have the "
                "same prompt; expected two prompts at least; add rows"
            )
        unrelated = tuple(_behind(prompt, one, max_tokens) for one in other.responses)
        found.append(replace(item, unrelated=unrelated))
    return found


def _prompt(one: Demonstration) -> np.ndarray:
    return one.token_ids[: int(one.is_learned.argmax())]


def _behind(prompt: np.ndarray, other: Demonstration, max_tokens: int) -> Demonstration:
    start = int(other.is_learned.argmax())
    ids, mask = other.token_ids[start:], other.is_learned[start:]
    return Demonstration(
        token_ids=np.concatenate([prompt, ids])[:max_tokens],
        is_learned=np.concatenate([np.zeros(len(prompt), dtype=bool), mask])[:max_tokens],
    )


def _label(row: Record, data: FeedbackConfig, *, takes_unpaired: bool) -> bool:
    value = row.values[data.label_field]
    if not takes_unpaired:
        raise DataError(
            f"{row.origin} has one response and its '{data.label_field}' (data.label_field); expected pairs of chosen "
            "and rejected; set loss.type to kto"
        )
    if value not in (0, 1):
        raise DataError(
            f"{row.origin}: field '{data.label_field}' must be true or false, 1 or 0, got {quote(value)}; see "
            "data.label_field"
        )
    return bool(value)
