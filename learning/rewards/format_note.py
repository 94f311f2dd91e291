"""Whether a pattern of `reward.kind: format` can match what a model writes behind these prompts."""

from __future__ import annotations

from collections.abc import Iterable

import regex
from transformers import PreTrainedTokenizerBase


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
