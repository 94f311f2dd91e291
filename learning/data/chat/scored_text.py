"""What a reward model reads: token ids of a prompt and a response, the same in training and in PPO.

Source: Ouyang et al. 2022, section 3.5 (a reward model reads prompt and response and gives a scalar).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import regex
from transformers import PreTrainedTokenizerBase

from .chat_format import own_template, render_chat
from .messages import Tools, Turn, as_dicts, num_shared


def render(
    tokenizer: PreTrainedTokenizerBase,
    prompt_text: str,
    turns: Sequence[Turn | tuple[str, str]],
    response: str | Turn,
    *,
    max_tokens: int | None,
    tools: Tools = (),
    at: datetime | None = None,
) -> list[int]:
    """Token ids that are scored.

    Args:
        tokenizer: the reward model's own.
        prompt_text: what is scored before the response where there are no messages, or no template for them.
        turns: the conversation before the response, whole messages or (role, content); the response is the assistant's.
        response: the text that is scored (`written_text`); or the assistant's message whole.
        max_tokens: the prompt loses its beginning above so many; the response is never cut. None: no limit.
        tools: that the chat template is told of.
        at: the time that the template is told; None: the tokenizer's own (`keep_time`).

    Returns:
        Ids with the special tokens that template or tokenizer add.
    """

    def encode(text: str, *, special: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    template = own_template(tokenizer, tools=tools)
    if turns and template is not None:
        said = {"role": "assistant", "content": response} if isinstance(response, str) else response
        asked = [turn if isinstance(turn, Mapping) else as_dicts([turn])[0] for turn in turns]
        before, whole = (
            # the template writes the special tokens itself
            encode(
                render_chat(tokenizer, talk, ask=ask, tools=tools, template=template, at=at), special=False
            )
            for talk, ask in ((asked, True), ([*asked, said], False))
        )
    else:
        text = response if isinstance(response, str) else str(response["content"])
        before = encode(prompt_text, special=True) if max_tokens is not None else []
        whole = encode(prompt_text + text, special=True)
    if max_tokens is None or len(whole) <= max_tokens:
        return whole
    begin = (tokenizer.bos_token_id, tokenizer.cls_token_id)
    # every text of the model begins with it, and it is kept; the prompt ends where both go apart
    first = whole[:1] if whole[0] in begin else []
    return first + whole[min(len(whole) - max_tokens + len(first), num_shared(before, whole)) :]


def format_notes(pattern: str, prefills: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line for every reason why a pattern can never match, as far as it can be told.

    `prefills`: what prompts begin the assistant's turn with, "" for nothing. The pattern is compared with the response
    alone, and with it behind the prefill.
    """
    ends = dict.fromkeys(one for one in (tokenizer.eos_token, tokenizer.pad_token) if isinstance(one, str))
    notes = [
        f"reward.pattern names {end}, which is cut off a response's end, so it may never match; take it out"
        for end in ends
        if end in pattern or regex.escape(end) in pattern
    ]
    for prefill in sorted({one for one in prefills if one}):
        if _can_begin(pattern, prefill):
            continue
        notes.append(
            f"prompts begin the assistant's turn with {prefill!r}, and nothing that begins so matches reward.pattern: "
            "it matches responses alone, which are without it; let it begin with that text"
        )
    return notes


def _can_begin(pattern: str, text: str) -> bool:
    try:
        return regex.compile(pattern, regex.DOTALL).fullmatch(text, partial=True, timeout=1.0) is not None
    except (regex.error, TimeoutError):
        return True  # Python's own `re` read it: nothing is known
