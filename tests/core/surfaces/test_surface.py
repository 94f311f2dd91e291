from __future__ import annotations

import logging

import pytest

from rlhfspec.core.errors import DataError
from rlhfspec.core.surfaces.surface import Surface, note_once, surfaces

TALK = Surface(
    name="talk",
    title="a talk",
    unknown="refuse",
    advice="take it out",
    used={"role": "who speaks", "x_*": "all of x"},
    harmless={"id": "names it"},
    only={"weight": {"values": [1], "otherwise": "leave the row out"}},
    refused={"images": "text alone is read", "x_y": "not this x"},
)


@pytest.mark.parametrize(
    "given", [{"role": 1, "id": 2}, {"weight": 1}, {"weight": 1.0}, {"images": None}, {"x_z": 1}]
)
def test_what_is_used_or_harmless_passes(given: dict) -> None:
    TALK.require(given, "row 1", error=DataError)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weight": 0}, ["row 1", "'weight'", "expected none or 1", "got 0", "leave the row out"]),
        ({"weight": True}, ["got True"]),
        ({"images": []}, ["'images'", "text alone is read"]),
        ({"x_y": 1}, ["not this x"]),
        ({"colour": 1}, ["'colour'", "used are role", "take it out"]),
        ({"rolle": 1}, ["did you mean 'role'?"]),
        ({"x" * 500: 1}, ["take it out"]),
    ],
)
def test_anything_else_is_refused_by_name(given: dict, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        TALK.require(given, "row 1", error=DataError)
    assert [word for word in words if word not in str(caught.value)] == []


def test_what_only_the_reader_knows_is_used_too() -> None:
    TALK.require({"question": "?"}, "row 1", error=DataError, also=["question"])


def test_an_unknown_name_may_be_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    noted = Surface(name="n", title="n", unknown="note", advice="look at it", refused={"bad": "fix it"})
    note_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            noted.require({"odd": 1}, "config.json", error=DataError)
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "config.json has 'odd', which nothing here reads"
    ]
    with pytest.raises(DataError, match="fix it"):
        noted.require({"bad": 1}, "config.json", error=DataError)


@pytest.mark.parametrize("name", surfaces())
def test_every_table_says_why(name: str) -> None:
    one = surfaces()[name]
    reasons = [*one.used.values(), *one.harmless.values(), *one.refused.values(), one.title, one.advice]
    reasons += [row["otherwise"] for row in one.only.values()]
    assert all(isinstance(text, str) and len(text) > 3 for text in reasons)
    assert one.unknown in ("refuse", "note")
