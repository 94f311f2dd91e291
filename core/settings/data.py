"""Where prompts come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from core.settings.section import Section, UserPath

MAX_DRAWN_PROBLEMS = 1_000_000


class DataConfig(Section):
    """Where prompts come from: a task that makes them, or a data set of real ones."""

    task: Literal["chain", "one_sentence"] | None = None
    "a generated task, letter chains or questions for a chat model; excludes `path`"
    path: UserPath | None = None
    "a .jsonl or .parquet file, or the name of a `datasets` data set"
    split: str = "train"
    "used with a `datasets` name only"
    prompt_field: str = "question"
    reference_field: str | None = "answer"
    prompt_template: str = "{prompt}"
    "how the prompt field becomes text"
    chat: bool = False
    "true: the tokenizer's chat template is applied to one user turn"
    max_prompt_tokens: int = Field(default=512, ge=1)
    "more characters than so many of the tokenizer's longest tokens hold are too long uncounted"
    on_long_prompt: Literal["fail", "skip"] = "fail"
    shuffle: bool = True
    limit: int | None = Field(default=None, ge=1)
    "use only the first rows"

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.task is None) == (self.path is None):
            raise ValueError("give exactly one of data.task (a generated task) and data.path (a data set)")
        if "{prompt}" not in self.prompt_template:
            raise ValueError(
                "data.prompt_template must hold {prompt}, or every prompt is the same; put it in"
            )
        if self.task is not None and (self.limit or 0) > MAX_DRAWN_PROBLEMS:
            raise ValueError(
                f"data.limit {self.limit:,} is more than a generated task draws; expected at most "
                f"{MAX_DRAWN_PROBLEMS:,}"
            )
        return self
