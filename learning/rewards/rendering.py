"""What a reward model reads: token ids of a prompt and a response, the same in training and in PPO.

Source: Ouyang et al. 2022, section 3.5 (a reward model reads prompt and response and gives a scalar).
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from learning.data.chat_format import render_chat


def render(
    tokenizer: PreTrainedTokenizerBase,
    prompt_text: str,
    messages: Sequence[tuple[str, str]],
    response: str,
    *,
    max_tokens: int | None,
) -> list[int]:
    """Token ids that are scored.

    Args:
        tokenizer: the reward model's own.
        prompt_text: what is scored before the response where there are no messages, or no template for them.
        messages: the conversation before the response, (role, content) in order; the response is the assistant's.
        response: decoded, without special tokens.
        max_tokens: the prompt loses its beginning above so many; the response is never cut. None: no limit.

    Returns:
        Ids with the special tokens that template or tokenizer add.
    """
    if messages and tokenizer.chat_template is not None:
        turns = [{"role": role, "content": content} for role, content in messages]
        before = _templated(tokenizer, turns, add_generation_prompt=True)
        whole = _templated(tokenizer, [*turns, {"role": "assistant", "content": response}])
    else:
        before = list(tokenizer(prompt_text)["input_ids"]) if max_tokens is not None else []
        whole = list(tokenizer(prompt_text + response)["input_ids"])
    if max_tokens is None or len(whole) <= max_tokens:
        return whole
    begin = (tokenizer.bos_token_id, tokenizer.cls_token_id)
    # every text of the model begins with it: it is kept
    first = whole[:1] if whole[0] in begin else []
    return first + whole[min(len(whole) - max_tokens + len(first), _num_shared(before, whole)) :]


def _templated(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], *, add_generation_prompt: bool = False
) -> list[int]:
    text = render_chat(tokenizer, turns, ask=add_generation_prompt)
    # the template writes the special tokens itself
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with: where the prompt ends, whatever a template puts behind it."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
