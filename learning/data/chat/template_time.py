"""The time that chat templates are told: one that a run has taken once.

A template may print the day (`strftime_now`). What a run saw would then depend on when it is looked at: a run that is
resumed, verified or evaluated on another day would have other prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any

from jinja2 import nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from ....core.errors import DataError, ModelError
from .template_variables import parsed

_KEPT = "rlhfspec_template_time"
"Attribute of a tokenizer whose templates are told a time."
_TIME: ContextVar[datetime | None] = ContextVar("template_time", default=None)


def keep_time(tokenizer: PreTrainedTokenizerBase, at: str | datetime | None) -> PreTrainedTokenizerBase:
    """Tell this time, ISO 8601, to the tokenizer's chat templates; None: the clock's. Returns the tokenizer."""
    setattr(tokenizer, _KEPT, datetime.fromisoformat(at) if isinstance(at, str) else at)
    return tokenizer


@contextmanager
def template_time_of(
    tokenizer: PreTrainedTokenizerBase, template: str | None, at: datetime | None = None
) -> Iterator[None]:
    """Render the template's text within: it is told `at`, else the tokenizer's time, else the clock's.

    Raises DataError: the template draws at random. ModelError: this transformers' templates cannot be told a time.
    """
    text = template or ""
    if (drawing := _drawing(text)) is not None:
        raise DataError(
            f"the chat template draws at random ({drawing}), so that a prompt is another one at every look; expected "
            "a template that writes the same for the same messages; take that out"
        )
    at = at or getattr(tokenizer, _KEPT, None)
    if at is None:
        yield
        return
    if "strftime_now" in text:
        _require_clock()
    before = _TIME.set(at)
    try:
        yield
    finally:
        _TIME.reset(before)


@lru_cache(maxsize=64)
def _drawing(text: str) -> str | None:
    """What a template draws at random with; None: nothing."""
    if "random" not in text and "lipsum" not in text:
        return None
    if (tree := parsed(text)) is None:
        return None
    if any(node.name == "random" for node in tree.find_all(nodes.Filter)):
        return "| random"
    called = [node.node for node in tree.find_all(nodes.Call)]
    return "lipsum()" if any(isinstance(one, nodes.Name) and one.name == "lipsum" for one in called) else None


@cache
def _require_clock() -> None:
    """Raise ModelError where transformers' templates do not ask the clock that is told the time."""
    moment = datetime(1999, 12, 31)
    before = _TIME.set(moment)
    try:
        render: Any = chat_template_utils.render_jinja_template
        (year,), _ = render(conversations=[[]], chat_template="{{ strftime_now('%Y') }}")
    finally:
        _TIME.reset(before)
    if year != "1999":
        raise ModelError(
            "the chat template prints the time (strftime_now), and this version of transformers does not let a run "
            "keep its own; expected a version that pyproject.toml names; install it, or write the day into the template"
        )


class _Clock:
    """What transformers' `strftime_now` asks: a kept time where there is one."""

    @staticmethod
    def now() -> datetime:
        at = _TIME.get()
        return datetime.now() if at is None else _Moment.fromisoformat(at.isoformat())


class _Moment(datetime):
    """Written without its zone, as by transformers, and `%s` not by the process's."""

    def strftime(self, format: str, /) -> str:
        """As `datetime.strftime`."""
        aware = self if self.tzinfo is not None else self.replace(tzinfo=UTC)
        seconds = re.sub(r"(?<!%)%s", str(int(aware.timestamp())), format)
        return datetime.strftime(self.replace(tzinfo=None), seconds)


setattr(chat_template_utils, "datetime", _Clock)  # noqa: B010
