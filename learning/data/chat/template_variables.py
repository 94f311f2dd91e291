"""Which variables a chat template reads: what it is given and does not read, or reads and is not given, is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes

from ....core.errors import DataError
from ....core.surfaces.surface import note_once, surface

_MARKS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_GIVEN = {"raise_exception", "strftime_now"}
_OPTIONAL = (nodes.And, nodes.Or, nodes.Not, nodes.Test)


@lru_cache(maxsize=64)
def parsed(template: str) -> nodes.Template | None:
    """A template as Jinja reads it; None for one that it refuses: rendering says why."""
    try:
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", template))
    except jinja2.TemplateError:
        return None


@lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """Variables that a template reads and does not set; of one that cannot be parsed all its words."""
    tree = parsed(template)
    return words_of(template) if tree is None else frozenset(meta.find_undeclared_variables(tree)) - _GIVEN


@lru_cache(maxsize=64)
def words_of(template: str) -> frozenset[str]:
    """All words of a template: what it reads of a message is among them."""
    return frozenset(re.findall(r"\w+", template))


def require_variables(
    template: str,
    given: Mapping[str, Any],
    *,
    known: Collection[str] = (),
    note: Callable[[str], object] | None = None,
    advice: str = "data.chat_template_kwargs gives variables",
) -> None:
    """Raise DataError for one of data.chat_template_kwargs that changes nothing; `note` hears of what is not given.

    `known`: what else the template is given, such as the tokenizer's special tokens. `advice`: what gives more.
    """
    read = template_variables(template)
    surface("chat_template_kwargs").require(
        dict.fromkeys(given, True), "data.chat_template_kwargs", error=DataError, also=sorted(read)
    )
    needed = {name: True for name in sorted(_needed(template)) if name not in known}
    surface("chat_template").require(
        needed,
        "the chat template",
        error=DataError,
        also=given,
        note=lambda text: (note or note_once)(f"{text}; {advice}"),
    )


@lru_cache(maxsize=64)
def _needed(template: str) -> frozenset[str]:
    """Variables that it reads without asking first whether they are there, and sets nowhere, in an `if` neither."""
    tree = parsed(template)
    if tree is None:
        return frozenset()
    optional = {name.name for part in _optional(tree) for name in part.find_all(nodes.Name)}
    made = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    return template_variables(template) - optional - made


def _optional(tree: nodes.Template) -> Iterator[nodes.Node]:
    for node in tree.find_all((nodes.If, nodes.CondExpr)):
        yield nodes.Output([node.test])
    for node in tree.find_all(_OPTIONAL):
        yield node
    for node in tree.find_all(nodes.Filter):
        if node.name in ("default", "d"):
            yield node
