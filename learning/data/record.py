"""One record of a data set as it was read, and what its fields hold; errors name its file and line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import DataError
from ...core.outside import cut
from ...core.settings.data import DataConfig
from ...core.settings.section import TEMPLATE_NAME
from ...core.settings.supervised import ExamplesConfig
from ...core.surfaces.surface import surface
from .chat.messages import ROLES, Turn, parse_turns, require_whole_text, tools_of, turn_list

_EMPTY = (None, "", "[]", "{}", "null", [], {})
"What columns hold that hold nothing."


@dataclass(frozen=True, slots=True)
class Record:
    """`key` of its methods is the setting that named a field; they raise DataError."""

    origin: str
    "file and line, or row"
    values: dict[str, Any] = field(default_factory=dict)
    fault: DataError | None = None
    "what is wrong with it; it has no values then"
    padded: bool = False
    "of columns, where every object has all keys that any has"
    is_whole: Callable[[str], bool] | None = field(default=None, compare=False, repr=False)
    "whether all numbers under a name are whole ones that are written as floats"
    source: int = 0
    "which of data.sources it is of"

    def find(self, name: str, key: str) -> Any:
        """What stands under a name, or under a path of names in columns that hold objects."""
        if name in self.values:
            return self.values[name]
        node: Any = self.values
        for part in name.split("."):
            if not isinstance(node, dict) or part not in node:
                raise missing_field(self.origin, name, key, self.values)
            node = node[part]
        return node

    def text(self, name: str, key: str) -> str:
        """A text, or a finite number as one."""
        value = self.find(name, key)
        is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
        if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
            raise DataError(f"{self._of(name)} must be text, got {type(value).__name__}; see {key}")
        if (
            isinstance(value, float)
            and value.is_integer()
            and self.is_whole is not None
            and self.is_whole(name)
        ):
            value = int(value)
        return require_whole_text(str(value), self._of(name))

    def number(self, name: str, key: str) -> float:
        """A finite number."""
        value = self.find(name, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"{self._of(name)} must be a finite number, got {value!r}; see {key}")
        return float(value)

    def plain(self, name: str, key: str) -> Any:
        """A JSON value."""
        value = self.find(name, key)
        try:
            return json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self._of(name)} must hold text, finite numbers, lists or objects, got "
                f"{type(value).__name__}: {error}; see {key}"
            ) from error

    def turns(self, name: str, key: str, *, roles: Sequence[str] | None = ROLES) -> list[Turn]:
        """The messages of a conversation; `roles` that are known, None: any."""
        return parse_turns(self._unpadded(name, key), self._of(name), roles=roles)

    def holds_list(self, name: str) -> bool:
        """Whether the field is a conversation and no text."""
        return isinstance(turn_list(self.values.get(name)), list)

    def tools(self, name: str | None) -> tuple[dict[str, Any], ...]:
        """What the assistant may call; none where there is no such field."""
        if name is None or not has_field(self.values, name):
            return ()
        return tools_of(self._unpadded(name, "data.tools_field"), self._of(name))

    def for_teacher(self, data: DataConfig, prompt: str, reference: str) -> str | None:
        """What data.teacher_prompt_template says; `{answer}` is the reference. Raises DataError: it names nothing."""
        template, key = data.teacher_prompt_template, "data.teacher_prompt_template"
        if template is None:
            return None
        columns = self.values.keys() - {"prompt"}
        known = {"prompt": prompt} | ({"answer": reference} if reference else {})
        if unknown := [
            name for name in TEMPLATE_NAME.findall(template) if name not in columns | known.keys()
        ]:
            lacks = "no reference" if unknown[0] == "answer" else "no such column"
            raise DataError(
                f"{self.origin}: {key} names {{{unknown[0]}}}, and the row has {lacks} (columns: "
                f"{cut(', '.join(self.values)) or 'none'}); name one, or take it out"
            )
        return TEMPLATE_NAME.sub(
            lambda name: self.text(name[1], key) if name[1] in columns else known[name[1]], template
        )

    def filled(self, template: str, prompt: str) -> str:
        """A prompt template with its names filled in, the row's columns by their own; other braces stay."""

        def value(name: re.Match[str]) -> str:
            if name[1] == "prompt":
                return prompt
            return self.text(name[1], "data.prompt_template") if name[1] in self.values else name[0]

        return TEMPLATE_NAME.sub(value, template)

    def _unpadded(self, name: str, key: str) -> Any:
        def without_nulls(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: without_nulls(held) for key, held in value.items() if held is not None}
            return [without_nulls(one) for one in value] if isinstance(value, list) else value

        value = self.find(name, key)
        return without_nulls(value) if self.padded else value

    def _of(self, name: str) -> str:
        return f"{self.origin}: field '{name}'"


class Columns:
    """Sees to it that no column that holds anything is passed over in silence."""

    def __init__(
        self, kind: str, data: DataConfig | ExamplesConfig, note: Callable[[str], object] | None = None
    ) -> None:
        """`kind` is a surface; `note` hears, once for each, of columns that are left unread."""
        self._surface = surface(kind)
        self._looked_at = {*data.ignored_fields, *([] if data.tools_field else ["tools"])}
        self._note = note

    def require(self, values: Mapping[str, Any], read: Collection[str], origin: str) -> None:
        """Raise DataError for a column that is none of `read` and cannot be left out of account."""
        new = {
            name: value
            for name, value in values.items()
            if name not in read and name not in self._looked_at and value not in _EMPTY
        }
        if new:
            self._surface.require(new, origin, error=DataError, also=read, note=self._note)
            self._looked_at |= new.keys()

    def is_refused(self, name: str) -> bool:
        """Whether a column of this name is looked at in every row."""
        fault = self._surface.fault(name, True)
        return fault is not None and not fault.is_note


def top_names(names: Iterable[str | None], values: Container[str]) -> dict[str, None]:
    """The columns that names, or paths of names, are found in, as keys in their order."""
    given = [name for name in names if name is not None]
    return dict.fromkeys(name if name in values else name.split(".")[0] for name in given)


def has_field(fields: Mapping[str, Any], name: str) -> bool:
    """Whether there is a field of a name, or the first of a path of names."""
    return name in fields or ("." in name and name.split(".")[0] in fields)


def named_columns(template: str, columns: Container[str]) -> tuple[str, ...]:
    """The columns that a prompt template names beside `{prompt}`, in its order."""
    names = dict.fromkeys(TEMPLATE_NAME.findall(template))
    return tuple(name for name in names if name != "prompt" and name in columns)


def missing_field(origin: str, name: str, key: str, fields: Mapping[str, Any]) -> DataError:
    """The error to raise for a field that is not there."""
    return DataError(f"{origin} has no field '{name}' ({key}); its fields are {cut(', '.join(fields))}")
