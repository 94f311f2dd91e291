"""Surfaces: every name in an input of somebody else's is used, known to be harmless, or refused.

A reader of such an input (a message, a request body, a config.json, an adapter's tensors) has a table in one of the
`*.toml` files here and hands over the names it found before it reads any of them. A name that is in no table is
refused, or noted once where refusing would be foolish; none is passed over in silence.
"""

from __future__ import annotations

import difflib
import logging
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..outside import cut, quote

logger = logging.getLogger(__name__)
TABLES = Path(__file__).parent
"A file of tables for each area; its first line, a comment, names the area in the reference."
_SHOWN = 12
"Names of a table that an error lists."


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One kind of input. Names may be patterns (`*`): a name itself goes before all, a longer pattern before others."""

    name: str
    title: str
    "whose keys they are, as the reference says it"
    unknown: Literal["refuse", "note"]
    "what becomes of a name that is in none of the tables below"
    advice: str
    "what to do about such a name"
    unread: str = "which nothing here reads"
    "what is said of such a name"
    used: Mapping[str, str] = field(default_factory=dict)
    "what each is read for"
    harmless: Mapping[str, str] = field(default_factory=dict)
    "why nothing is lost without each"
    only: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    "`values` that ask for nothing, and what to do about others (`otherwise`)"
    refused: Mapping[str, str] = field(default_factory=dict)
    "what to do instead"

    def require(
        self,
        given: Mapping[str, Any],
        what: str,
        *,
        error: Callable[[str], Exception],
        also: Collection[str] = (),
        note: Callable[[str], object] | None = None,
    ) -> None:
        """Raise `error` for the first name in `given` that would be ignored; note in one line what is but noted.

        Args:
            given: names and what stands under them. None is as a name that is not there.
            what: names the input in messages, such as "rows.jsonl, line 3: message 2".
            error: makes the exception of a message.
            also: further names that are used, which only the reader knows (columns that a template names).
            note: is told of what is but noted; None: `note_once`.
        """
        noted = []
        for name, fault in self.faults(given, also=also):
            if not fault.is_note:
                raise error(f"{what} has {fault.text}")
            noted.append(name)
        if noted:
            (note or note_once)(f"{what} has {self._unread(noted, also)}")

    def faults(self, given: Mapping[str, Any], *, also: Collection[str] = ()) -> Iterator[tuple[str, Fault]]:
        """Names in `given` that would be ignored, and why; arguments as above."""
        for name, value in given.items():
            if value is None or name in also or name in self.used or name in self.harmless:
                continue
            if (fault := self.fault(name, value, also=also)) is not None:
                yield name, fault

    def fault(self, name: str, value: Any, *, also: Collection[str] = ()) -> Fault | None:
        """What is wrong with a name and its value; None: it is used or harmless."""
        kind, row = self._row(name)
        shown = f"'{cut(str(name))}'"
        if kind in ("used", "harmless") or (
            kind == "only" and any(_same(value, one) for one in row["values"])
        ):
            return None
        if kind == "only":
            expected = " or ".join(["none", *(quote(one) for one in row["values"])])
            return Fault(f"{shown}: expected {expected}, got {quote(value)}; {row['otherwise']}")
        if kind == "refused":
            return Fault(f"{shown}, which cannot be taken into account; {row}")
        return Fault(self._unread([name], also), self.unknown == "note")

    def _unread(self, names: Sequence[str], also: Collection[str]) -> str:
        known = [*dict.fromkeys([*self.used, *also])]
        near = [one for name in names for one in difflib.get_close_matches(str(name), known, 1, 0.75)]
        listed = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        hint = f"did you mean '{near[0]}'?" if near else f"used are {listed or 'none'}"
        shown = ", ".join(f"'{cut(str(name))}'" for name in names[:_SHOWN])
        more = ", ..." if len(names) > _SHOWN else ""
        return f"{shown}{more}, {self.unread} ({hint}); {self.advice}"

    def _row(self, name: str) -> tuple[str, Any]:
        """The table that a name stands in, and what it says there."""
        tables = {
            "used": self.used,
            "harmless": self.harmless,
            "only": self.only,
            "refused": self.refused,
        }
        for kind, table in tables.items():
            if name in table:
                return kind, table[name]
        fitting = [
            (len(pattern), kind, row)
            for kind, table in tables.items()
            for pattern, row in table.items()
            if "*" in pattern and fnmatchcase(str(name), pattern)
        ]
        return max(fitting, key=lambda one: one[0])[1:] if fitting else ("unknown", None)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a name cannot be passed over."""

    text: str
    is_note: bool = False


@cache
def surfaces() -> Mapping[str, Surface]:
    """All tables, by name. Raises ValueError: two of one name, or a name that stands in two tables of one surface."""
    found: dict[str, Surface] = {}
    for file in sorted(TABLES.glob("*.toml")):
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, row in tables.items():
            if name in found:
                raise ValueError(f"{file.name}: there is a surface '{name}' already")
            # tables of a surface before it in the file, which this one has too
            for kind, table in tables.get(row.pop("extends", ""), {}).items():
                row[kind] = table | row.get(kind, {}) if kind in _KINDS else row.get(kind, table)
            found[name] = Surface(name=name, **row)
            rows = [key for kind in _KINDS for key in getattr(found[name], kind)]
            if len(set(rows)) < len(rows):
                raise ValueError(f"{file.name}: '{name}' has a key twice")
    return found


_KINDS = ("used", "harmless", "only", "refused")


def surface(name: str) -> Surface:
    """The surface of a name."""
    return surfaces()[name]


@cache
def note_once(text: str) -> None:
    """Warn, once in this process."""
    logger.warning("%s", text)


def _same(value: Any, expected: Any) -> bool:
    """Equality that does not take true for 1."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)
