"""Prompts: read from a task, a file or a data set, and handed out with keys that are never reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from core.config import DataConfig, SamplingConfig
from core.errors import DataError
from core.records import Completion, Prompt, SamplingParams
from learning.data.records_io import Row, read_rows
from learning.tasks.chain_task import draw_problem
from learning.tasks.one_sentence import draw_prompts

DRAWN_PROMPTS = 4096
"""Prompts a generated task draws when data.limit says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset:
    """All prompts of a run, tokenised, in the order of their source."""

    prompts: tuple[Prompt, ...]
    num_skipped: int = 0
    "prompts left out because they were too long (data.on_long_prompt: skip)"

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self.prompts)


def load_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PromptDataset:
    """Read and tokenise the prompts that `data` describes.

    `seed` draws the problems of a generated task; files do not depend on it.
    Raises DataError naming file and line (or row): missing file, malformed record, missing field,
    empty data set, prompt longer than `max_prompt_tokens`.
    """
    rows = _drawn_rows(data, seed) if data.task else read_rows(data)
    max_chars = data.max_prompt_tokens * _longest_token(tokenizer)
    prompts: list[Prompt] = []
    num_skipped = 0
    for index, row in enumerate(rows):
        # a second for a million tokens: what is too long anyway is not tokenised
        token_ids = _encode(row, data, tokenizer) if len(row.prompt) <= max_chars else None
        if token_ids is None or len(token_ids) > data.max_prompt_tokens:
            if data.on_long_prompt == "fail":
                raise DataError(_too_long(row, token_ids, data, max_chars))
            num_skipped += 1
            continue
        if not token_ids:
            raise DataError(f"{row.origin}: the prompt is empty; expected at least one token")
        prompts.append(
            Prompt(
                prompt_id=index,
                token_ids=np.asarray(token_ids, dtype=np.int64),
                text=row.prompt,
                reference=row.reference,
                messages=(("user", data.prompt_template.replace("{prompt}", row.prompt)),)
                if data.chat
                else (),
            )
        )
    if not prompts:
        raise DataError(
            f"no prompt left of {data.path or data.task}: {num_skipped} were longer than "
            f"{data.max_prompt_tokens} tokens; expected at least one; check data.path and data.limit"
        )
    return PromptDataset(prompts=tuple(prompts), num_skipped=num_skipped)


def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token; of byte-level BPE its bytes, which are at least as many."""
    return max(len(token) for token in tokenizer.get_vocab())


def _too_long(row: Row, token_ids: list[int] | None, data: DataConfig, max_chars: int) -> str:
    got = f"{len(row.prompt):,} characters" if token_ids is None else f"{len(token_ids)} tokens"
    limit = f"{data.max_prompt_tokens}" + (
        f" (at most {max_chars:,} characters)" if token_ids is None else ""
    )
    return (
        f"{row.origin}: the prompt has {got}, data.max_prompt_tokens is {limit}; raise it, or set "
        "data.on_long_prompt to skip"
    )


def sampling_params(sampling: SamplingConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Sampling settings as the engine takes them, the tokenizer's end token among the stop tokens."""
    stops = list(sampling.stop_token_ids)
    eos = tokenizer.eos_token_id
    if isinstance(eos, int) and eos not in stops:
        stops.append(eos)
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=tuple(stops),
    )


def response_text(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """Decode a response for the reward function: special tokens dropped, nothing else touched."""
    text = tokenizer.decode(
        completion.token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text if isinstance(text, str) else "".join(text)


def _drawn_rows(data: DataConfig, seed: int) -> Sequence[Row]:
    rng = np.random.default_rng([seed, 0xC4A1])
    count = data.limit or DRAWN_PROMPTS
    if data.task == "chain":
        drawn = [(problem.prompt, problem.answer) for problem in (draw_problem(rng) for _ in range(count))]
    else:
        drawn = draw_prompts(count, rng)
    return [
        Row(prompt=prompt, reference=reference, origin=f"{data.task} problem {index}")
        for index, (prompt, reference) in enumerate(drawn)
    ]


def _encode(row: Row, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if data.task is not None and not data.chat:
        return tokenizer.encode(row.prompt, add_special_tokens=False)
    if not data.chat:
        return tokenizer.encode(data.prompt_template.replace("{prompt}", row.prompt))
    if tokenizer.chat_template is None:
        raise DataError(
            "data.chat is true but the tokenizer has no chat template; set data.chat to false, "
            "or models.tokenizer to one that has"
        )
    messages = [{"role": "user", "content": data.prompt_template.replace("{prompt}", row.prompt)}]
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
