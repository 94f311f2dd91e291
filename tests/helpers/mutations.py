"""Strategies for bad input: values of any kind, texts and bytes that were once good."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rlhfspec.core.config import Config

TOTAL = 2000
"Examples of all properties together, unless RLHFSPEC_MUTATIONS says another number."

FRAGMENTS = (
    "[", "]", "{", "}", ":", ": ", ",", "- ", "? ", "#", "|", ">", "%YAML 1.1", "---", "...", "\n", "\r", "\t",
    "&a ", "*a", "<<: ", "<<: *a", "!!int ", "!!float ", "!!binary ", "!!timestamp ", "!!python/object:os.system ",
    "'", '"', "\\", '"\\ud800"', '"\\0"', "\0", "\ufeff", "\u2028", "\x85", "é", "字", "😀", "null", "~", "true", "off",
    ".inf", "-.inf", ".nan", "NaN", "Infinity", "1e999", "-1", "0", "0x", "0b_", "1_0", "12:30:45", "2026-13-45",
    "9" * 5000, "0x" + "f" * 5000, "[" * 2000, '{"a":' * 2000, "x" * 5000, "../", "~no-such-user", "=", "run", "data",
)  # fmt: skip
"Pieces that mean something to some parser."

_CHARACTERS = st.characters(exclude_categories=())  # halves of surrogate pairs too
_NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, -(10**4000), 1e-320, 1e308]),
)
_WORDS = st.one_of(st.text(_CHARACTERS, max_size=20), st.sampled_from(FRAGMENTS))
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _WORDS, st.binary(max_size=8))
VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(_WORDS, st.integers(), st.none()), inner, max_size=4),
    ),
    max_leaves=4,
)


def examples(share: float) -> settings:
    """Settings of a property that takes `share` of all examples; the same ones in every run of CI.

    `RLHFSPEC_MUTATIONS=20000 pytest tests/cluster/test_mutated_inputs.py` draws so many, other ones each time.
    """
    wanted = os.environ.get("RLHFSPEC_MUTATIONS")
    return settings(
        max_examples=max(1, round(share * int(wanted or TOTAL))),
        derandomize=wanted is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def setting_paths(model: type[BaseModel] = Config, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all sections and settings."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_paths(field.annotation, (*path, name))


PATHS = st.sampled_from(sorted(setting_paths()))
_KEYS = st.one_of(PATHS, st.lists(_WORDS, min_size=1, max_size=3).map(tuple))


@st.composite
def changed_trees(draw: st.DrawFn, tree: dict[str, Any]) -> dict[Any, Any]:
    """`tree` with up to three values put in, at settings that there are or anywhere."""
    changed = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        *parents, leaf = draw(_KEYS)
        node = changed
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[leaf] = draw(VALUES)
    return changed


def choices(model: type[BaseModel] = Config) -> Iterator[str]:
    """Every word that some setting may be."""
    for field in model.model_fields.values():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from choices(kind)
        for option in (kind, *get_args(kind)):
            if get_origin(option) is Literal:
                yield from map(str, get_args(option))


LIKELY = st.sampled_from(
    [
        *(
            "0",
            "1",
            "2",
            "3",
            "7",
            "33",
            "500",
            "4294967296",
            "9000000000000000000",
            "0.5",
            "1.0",
            "1e-9",
            "1e15",
        ),
        *(
            "null",
            "true",
            "false",
            "[]",
            "[3]",
            "x",
            "a/b",
            "a:b",
            "os:getcwd",
            "json:loads",
            "./x",
            "/",
            ".",
            "~",
        ),
        *sorted(set(choices())),
    ]
)
"Values that pass the first look at some setting or other."


@st.composite
def overrides(
    draw: st.DrawFn,
    *,
    keys: st.SearchStrategy[tuple[str, ...]] = _KEYS,
    values: st.SearchStrategy[str] | None = None,
) -> str:
    """An argument of --set."""
    if values is not None:
        return ".".join(draw(keys)) + "=" + draw(values)
    value = draw(st.one_of(_WORDS, _NUMBERS.map(_as_text), st.lists(_WORDS, max_size=3).map("".join)))
    return ".".join(draw(keys)) + draw(st.sampled_from(["=", "=", "=", "", "=="])) + value


@st.composite
def changed_bytes(draw: st.DrawFn, raw: bytes, *, fragments: bool = True) -> bytes:
    """`raw` with up to four pieces cut out, put in, written over, doubled or moved."""
    pieces = st.binary(min_size=1, max_size=8)
    if fragments:
        pieces = st.one_of(st.sampled_from(FRAGMENTS).map(lambda text: text.encode()), pieces)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(raw)))
        end = min(len(raw), begin + draw(st.sampled_from([0, 0, 1, 2, 8, 64, 10**9])))
        kind = draw(st.sampled_from(["put", "cut", "over", "double", "move"]))
        piece = draw(pieces)
        if kind == "put":
            raw = raw[:begin] + piece + raw[begin:]
        elif kind == "cut":
            raw = raw[:begin] + raw[end:]
        elif kind == "over":
            raw = raw[:begin] + piece + raw[begin + len(piece) :]
        else:
            to = draw(st.integers(0, len(raw)))
            raw = (raw if kind == "double" else raw[:begin] + raw[end:])[:to] + raw[begin:end] + raw[to:]
    return raw


@st.composite
def changed_safetensors(draw: st.DrawFn, raw: bytes) -> bytes:
    """A weights file with another header: lengths, names, types, shapes and offsets that do not fit."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(header)))
        kind = draw(st.sampled_from(["drop", "rename", "dtype", "shape", "data_offsets", "any"]))
        if kind == "drop":
            del header[name]
        elif kind == "rename":
            header[draw(_WORDS)] = header.pop(name)
        elif kind == "any" or not isinstance(header[name], dict):
            header[name] = draw(st.one_of(st.none(), st.booleans(), st.integers(), st.just({}), st.just([])))
        else:
            values = {
                "dtype": st.sampled_from(
                    ["F32", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "nothing", "", 3, None]
                ),
                "shape": st.lists(st.integers(-1, 2**64), max_size=4),
                "data_offsets": st.lists(st.integers(-1, 2**64), max_size=3),
            }
            header[name] = header[name] | {kind: draw(values[kind])}
    text = json.dumps(header).encode()
    wrong = draw(st.sampled_from([0, 0, 0, 0, 1, -1, 10**6, 2**63, -(10**9)]))
    return struct.pack("<Q", (len(text) + wrong) % 2**64) + text + raw[8 + length :]


def _as_text(number: float) -> str:
    try:
        return str(number)
    except ValueError:  # more digits than Python writes
        return hex(int(number))
