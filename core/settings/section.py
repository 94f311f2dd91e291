"""What all sections of the config are made of: their base class and the kinds of values they share."""

from __future__ import annotations

import re
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

MAX_THREADS = 1024
TEMPLATE_NAME = re.compile(r"\{(\w+)\}")
"What a prompt template has filled in."
_MAX_NAME_BYTES = 100


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, numbers finite and of 64 bits, words without NUL."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Python takes true for 1
        kinds = _plain_kinds(cls.model_fields[info.field_name or ""].annotation)
        if bool in kinds or not kinds & {int, float}:
            return value
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, bool):
                raise ValueError(f"expected a number, got {str(one).lower()}, which is none; write a number")
        return value

    @model_validator(mode="after")
    def _plain_values(self) -> Self:
        for name, value in self:
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"{name} holds a NUL character, which no name or path may; take it out")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} must fit in 64 bits; got {value.bit_length()} bits")
        return self


def _moment(given: Any) -> Any:
    """A moment as ISO 8601 text; YAML may have read one already."""
    if isinstance(given, date):
        return given.isoformat()
    try:
        datetime.fromisoformat(str(given))
    except ValueError:
        raise ValueError(
            f"expected a moment such as 2026-01-31T09:00:00+00:00, got {str(given)[:40]!r}"
        ) from None
    return given


Moment = Annotated[str, BeforeValidator(_moment)]
"ISO 8601"


def _plain_kinds(annotation: Any) -> set[Any]:
    """All classes that an annotation is made of."""
    below = get_args(annotation)
    return set[Any]().union(*map(_plain_kinds, below)) if below else {annotation}


def folder_name(name: str) -> str:
    """Refuse what would leave `output_dir`, or what a shell or a file system takes for something else."""
    size = len(name.encode())
    if (
        not name
        or size > _MAX_NAME_BYTES
        or name[0] in ".-"
        or set("/\\") & set(name)
        or not name.isprintable()
    ):
        shown = repr(name) if size <= _MAX_NAME_BYTES else f"{name[:20]!r}... of {size} bytes"
        raise ValueError(
            f"expected a name for one folder (at most {_MAX_NAME_BYTES} bytes, no '/', '\\' or control character, "
            f"not beginning with '.' or '-'), got {shown}; run.output_dir says where run folders are made"
        )
    return name


def _known_home(path: str) -> str:
    """Refuse `~name` when there is no such user: nothing could be read or written there."""
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"the home folder that '{path}' begins with is not known; give the whole path"
        ) from None
    return path


def _names_a_column(template: str) -> str:
    if not TEMPLATE_NAME.search(template):
        raise ValueError(
            "expected {prompt}, or {COLUMN} for other columns of a row, or every prompt is the same; put one in"
        )
    return template


Name = Annotated[str, Field(min_length=1)]
PromptTemplate = Annotated[str, AfterValidator(_names_a_column)]
"text around `{prompt}`, the field that holds it, and `{COLUMN}`, any other column of a row"
UserPath = Annotated[Name, AfterValidator(_known_home)]
Seconds = Annotated[float, Field(gt=0.0, le=7 * 86_400.0)]
"at most a week: what waits longer has failed"
