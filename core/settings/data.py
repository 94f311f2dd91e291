"""Where prompts come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from .section import Name, PromptTemplate, Section, UserPath

MAX_DRAWN_PROBLEMS = 1_000_000
_TEMPLATE_ARGUMENTS = frozenset(
    {
        "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "messages",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "self",
    }
)  # fmt: skip
"What `apply_chat_template` is given already."

TemplateValue = bool | int | float | str | None


class SourceFields(Section):
    """What one source says of itself."""

    task: Literal["chain", "one_sentence"] | None = None
    "a generated task, letter chains or questions for a chat model; excludes `path`"
    path: UserPath | None = None
    "a file (JSON lines, a JSON list, CSV, Parquet), a pattern (`data/*.parquet`), a folder of such files, "
    "or a `datasets` name; `FOLDER:SUBSET`, `NAME:SUBSET`, `verifiers:NAME?option=value` (its rows) too"
    split: str = "train"
    "of a `datasets` name, or of a folder, whose files are named after their split or are all `train`"
    prompt_field: str = "question"
    "text, or a list of {role, content}; a path such as `extra.question` reaches into a column"
    messages_field: Name | None = None
    "a list of {role, content}; null: messages, prompt, conversation or conversations, where no prompt_field is"
    tools_field: Name | None = "tools"
    "what the chat template is told of, where a row has it: a list of JSON schemas, or its text; null: no tools"
    reference_field: str | None = "answer"
    "as above; a conversation without it has the answer that was cut off its end"
    reward_fields: tuple[Name, ...] = ()
    "further columns that reward functions see as `Prompt.fields`"
    ignored_fields: tuple[Name, ...] = ()
    "columns that are known and left unread; others that would change what is asked are refused"
    prompt_template: PromptTemplate = "{prompt}"
    "how the prompt field, or a conversation's last turn, becomes text; `{COLUMN}` is another column of the row"
    teacher_prompt_template: PromptTemplate | None = None
    "the same for models.teacher, which may be told more, such as `{prompt} (The answer is {answer}.)`; null: the same"
    chat: bool = False
    "true: the chat template is applied to one user turn; to conversations it always is"
    system_prompt: str | None = None
    "the first turn of every conversation that has no system turn of its own"
    filter: Name | None = None
    "package.module:function, or file.py:function, of a row (a dict of all its columns) -> bool; false leaves it out"
    order_by: Name | None = None
    """a column of numbers, such as difficulty: prompts come by it, least first, in every epoch, each source's by its
    own; evaluation.holdout takes the last ones; null: as the file has them"""
    skip_rows: int = Field(default=0, ge=0)
    "rows passed over first, such as those that are held out for evaluation"
    limit: int | None = Field(default=None, ge=1)
    "use only so many rows (of each source)"

    @model_validator(mode="after")
    def _usable(self) -> SourceFields:
        drawn = self.skip_rows + (self.limit or 0)
        if self.task is not None and drawn > MAX_DRAWN_PROBLEMS:
            raise ValueError(
                f"data.limit with data.skip_rows, {drawn:,}, is more than a generated task draws; expected at most "
                f"{MAX_DRAWN_PROBLEMS:,}"
            )
        if self.task is not None and self.order_by is not None:
            raise ValueError("data.order_by names a column, and a generated task has none; take it out")
        return self


class SourceConfig(SourceFields):
    """One of several sources; what it leaves out is as `data` says it."""

    weight: float = Field(default=1.0, gt=0.0, le=1e6)
    "beside the other sources'; data.weight_of says of what"

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        if (self.task is None) == (self.path is None):
            raise ValueError("give every one of data.sources exactly one of task and path")
        return self


class DataConfig(SourceFields):
    """Where prompts come from: a task that makes them, a data set of real ones, or several of both."""

    sources: tuple[SourceConfig, ...] = ()
    "several sources, each with its weight; instead of `task` or `path`"
    weight_of: Literal["prompt", "source"] = "prompt"
    "prompt: a prompt of weight 2 comes twice as often as one of weight 1; source: that holds for whole sources"
    stopping: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    "an epoch ends when every prompt has come at least once, or before one comes twice"
    chat_template: Name | None = None
    "a Jinja file, the template itself, or the name of one of the tokenizer's; null: the tokenizer's own"
    chat_template_kwargs: dict[str, TemplateValue] = Field(default_factory=dict)
    "further variables of the template, such as enable_thinking"
    max_prompt_tokens: int = Field(default=512, ge=1)
    "more characters than so many of the tokenizer's longest tokens hold are too long uncounted"
    min_prompt_tokens: int = Field(default=1, ge=1)
    "shorter prompts are left out"
    on_long_prompt: Literal["fail", "skip"] = "fail"
    deduplicate: Literal["none", "exact", "normalized"] = "none"
    "which prompts are left out as seen before; normalized: but for case, white space and Unicode form"
    shuffle: bool = True
    easy_threshold: float | None = Field(default=None)
    """a prompt whose samples had a mean of at least this, of the part `correct` or else of the reward before shaping,
    when it was learned from last is handed out no more, and a run ends when none is left (prime-rl's difficulty pools,
    which have the name); null: all come in every epoch"""

    @model_validator(mode="before")
    @classmethod
    def _fill_sources(cls, given: Any) -> Any:
        """Write what `data` says into the sources, so that each is whole, and is written so."""
        if not isinstance(given, dict) or not isinstance(given.get("sources"), list | tuple):
            return given
        shared = {key: given[key] for key in SourceFields.model_fields if key in given}
        for key in ("task", "path"):
            shared.pop(key, None)
        sources = [
            one.model_dump(exclude_unset=True) if isinstance(one, SourceConfig) else one
            for one in given["sources"]
        ]
        return {
            **given,
            "sources": tuple({**shared, **one} if isinstance(one, dict) else one for one in sources),
        }

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_variables(cls, given: dict[str, TemplateValue]) -> dict[str, TemplateValue]:
        for key, value in given.items():
            if not key.isidentifier() or key in _TEMPLATE_ARGUMENTS:
                raise ValueError(
                    f"expected names of variables of the template, such as enable_thinking, got {key[:40]!r}"
                )
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"{key} holds a NUL character; take it out")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{key} must fit in 64 bits")
        return given

    @model_validator(mode="after")
    def _one_origin(self) -> DataConfig:
        if (self.task is not None) + (self.path is not None) + bool(self.sources) != 1:
            raise ValueError(
                "give exactly one of data.task (a generated task), data.path (a data set) and data.sources (several)"
            )
        if self.min_prompt_tokens > self.max_prompt_tokens:
            raise ValueError("data.min_prompt_tokens must not exceed data.max_prompt_tokens")
        if self.shuffle and any(source.order_by is not None for source in (self, *self.sources)):
            raise ValueError("data.order_by says in which order prompts come; set data.shuffle to false")
        return self

    def each_source(self) -> tuple[DataConfig, ...]:
        """One config a source, in their order; a single source's is this one."""
        if not self.sources:
            return (self,)
        return tuple(
            self.model_copy(
                update={
                    "sources": (),
                    **{key: getattr(source, key) for key in SourceFields.model_fields},
                }
            )
            for source in self.sources
        )

    @property
    def name(self) -> str:
        """What a single source is called in messages."""
        return self.path or str(self.task)


def require_easy_threshold(
    data: DataConfig, *, reward: str, looks_ahead: bool, evaluated: DataConfig | None
) -> None:
    """Raise ValueError where solved prompts are to be left out, and nothing says so before prompts are handed out."""
    if evaluated is not None and evaluated.easy_threshold is not None:
        raise ValueError(
            "evaluation.data.easy_threshold has no effect: evaluations ask every prompt; take it out"
        )
    if data.easy_threshold is None:
        return
    others = (
        ("reward.kind none", reward == "none"),
        ("rollout.look_ahead, which hands prompts out before these", looks_ahead),
    )
    for other in (other for other, is_set in others if is_set):
        raise ValueError(
            f"data.easy_threshold leaves out prompts by their rewards and goes with no {other}; take one of them out"
        )
