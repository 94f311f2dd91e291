"""Raw rows of a data set for supervised training, and which of them are held out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from rlhfspec.core.errors import DataError
from rlhfspec.core.settings.supervised import DemonstrationsConfig, ExamplesConfig, PreferencesConfig
from rlhfspec.learning.data.messages import role_and_content, turn_list
from rlhfspec.learning.data.raw_records import iter_records
from rlhfspec.learning.data.record import Record

_HELD_OUT = 0x5EED
"In the seed of the split, so that it is not the seed of the rows' order."


def read_raw_rows(data: ExamplesConfig, *, seed: int) -> tuple[list[Record], list[Record]]:
    """The rows to learn from and those that are held out, each in the order of its file.

    Raises DataError: a file that is missing, malformed (naming the line) or empty, or too short to hold any row out.
    """
    rows = _some(data, data.path, "data.path")
    if data.eval_path is not None:
        return rows, _some(data, data.eval_path, "data.eval_path")
    num_held_out = round(len(rows) * data.eval_share)
    if data.eval_share > 0.0:
        num_held_out = max(num_held_out, 1)
    if num_held_out >= len(rows):
        raise DataError(
            f"{data.path} has {len(rows)} row(s), too few to learn from some and hold {num_held_out} out; expected "
            "more, or name data.eval_path, or set data.eval_share to 0"
        )
    order = np.random.default_rng([seed, _HELD_OUT]).permutation(len(rows))
    prompts = [_prompt_of(row, data) for row in rows]
    if len(set(prompts)) == 1:  # of one prompt only rows can be held out
        prompts = [row.origin for row in rows]
    held_out = _with_equals(order.tolist(), prompts, num_held_out)
    learned = [row for index, row in enumerate(rows) if index not in held_out]
    return learned, [rows[index] for index in sorted(held_out)]


def _with_equals(order: Sequence[int], prompts: Sequence[str], num_held_out: int) -> set[int]:
    """About so many rows in the order drawn, each with all rows of its prompt; at least one prompt is left."""
    by_prompt: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(index)
    held_out: set[int] = set()
    num_left = len(by_prompt)
    for index in order:
        if len(held_out) >= num_held_out or num_left == 1:
            break
        if index not in held_out:
            held_out.update(by_prompt[prompts[index]])
            num_left -= 1
    return held_out


def _prompt_of(row: Record, data: ExamplesConfig) -> str:
    """What rows of one prompt have alike: the field, or the turns up to where the assistant first answers."""
    given = row.values.get(data.prompt_field)
    if given is None:
        name = messages_name(row, data) if isinstance(data, DemonstrationsConfig) else None
        name = data.chosen_field if isinstance(data, PreferencesConfig) else name
        given = turn_list(row.values.get(name)) if name is not None else None
        other = row.values.get(data.rejected_field) if isinstance(data, PreferencesConfig) else None
        if isinstance(given, str) and isinstance(other, str):
            given = _shared(given, other)
        elif isinstance(given, list):
            answers = (isinstance(turn, dict) and role_and_content(turn)[0] == "assistant" for turn in given)
            given = given[: next((place for place, answer in enumerate(answers) if answer), len(given))]
    return given.strip() if isinstance(given, str) else repr(given if given is not None else row.origin)


def messages_name(row: Record, data: DemonstrationsConfig) -> str | None:
    """The field that holds the row's conversation: `data.messages_field`, or ShareGPT's; None for a row without."""
    names = (
        (data.messages_field, "conversations")
        if data.messages_field == "messages"
        else (data.messages_field,)
    )
    return next((name for name in names if row.values.get(name) is not None), None)


def _some(data: ExamplesConfig, path: str, key: str) -> list[Record]:
    rows: list[Record] = []
    for record in iter_records(path, data.split, key=key):
        if record.fault is not None:
            raise record.fault
        rows.append(record)
        if data.limit is not None and len(rows) >= data.limit:
            break
    if not rows:
        raise DataError(f"{path} is empty: expected at least one record, got none; check {key}")
    return rows


def _shared(one: str, other: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in pairs)
