"""What a teacher reads in a prompt's place: columns, the reference, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from word_chat import PLAIN, word_chat

from rlhfspec.core.config import DataConfig
from rlhfspec.core.errors import DataError
from rlhfspec.learning.data.prompts import load_prompts

TEMPLATE = "{prompt} ( {answer} ) {hint}"


def read(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = word_chat(PLAIN)
    found = load_prompts(
        DataConfig(path=str(file), **{"teacher_prompt_template": TEMPLATE, **data}), tokenizer, seed=0
    )
    return [tokenizer.decode(prompt.teacher_ids) for prompt in found.prompts]


def test_columns_and_the_reference_are_filled_in(tmp_path: Path) -> None:
    rows = [{"question": "{hint} a", "solution": "b", "hint": "c"}]
    assert [said.split() for said in read(tmp_path, rows, reference_field="solution")] == [
        word_chat(PLAIN).decode(word_chat(PLAIN)("{hint} a ( b ) c")["input_ids"]).split()
    ]


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        ([{"question": "a", "answer": "b"}], {}, r"names \{hint\}, and the row has no such column"),
        (
            [{"question": "a", "hint": "c"}],
            {"reference_field": None},
            r"names \{answer\}, and the row has no reference",
        ),
        ([{"question": "a", "answer": "b", "hint": None}], {}, "see data.teacher_prompt_template"),
        (
            [{"question": "a", "answer": "b", "hint": ""}],
            {"teacher_prompt_template": "{hint}"},
            "the teacher's prompt is empty",
        ),
        (
            [{"question": "a", "answer": "b", "hint": "c c c c c c c c"}],
            {"max_prompt_tokens": 6},
            "tokens for the teacher, data.max_prompt_tokens is 6",
        ),
    ],
)
def test_what_a_teacher_would_miss_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, rows, **data)
