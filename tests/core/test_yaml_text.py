"""YAML as configs use it: plain values, every key once, and a place for every fault."""

from __future__ import annotations

import pytest

from rlhfspec.core.yaml_text import MAX_CHARS, YamlFault, parse_yaml


def laughs(levels: int) -> str:
    """Aliases of aliases: ten times as many values a level."""
    lines = ["k0: &k0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a: {b: 1, c: [2.5, true, null, word]}", {"a": {"b": 1, "c": [2.5, True, None, "word"]}}),
        ("a: off\nb: yes", {"a": "off", "b": "yes"}),
        ("a: 2026-13-45", {"a": "2026-13-45"}),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
        ("a: 1\nb: {a: 2}", {"a": 1, "b": {"a": 2}}),
        ("", None),
        ("=", "="),
    ],
)
def test_plain_values_are_read(text: str, values: object) -> None:
    assert parse_yaml(text) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {seed: 1}\nmodels: {}\nrun: {}", r"line 3, column 1: the key 'run' stands in line 1 already"),
        ("run: {seed: 1, 'seed': 2}", r"line 1, column 16: the key 'seed' stands in line 1 already"),
        (
            "a: !!python/object:os.system {}",
            r"line 1, column 4: the tag 'python/object:os.system' is not read",
        ),
        ("a: !!binary aGk=", r"the tag 'binary' is not read"),
        ("a: !mine 1", r"the tag '!mine' is not read"),
        ("a: " + "9" * 5000, r"line 1, column 4: '9{20}\.\.\. \(5000 characters\)' is no int"),
        ("a: !!int ''", r"'' is no int"),
        ("a: !!bool maybe", r"'maybe' is no bool"),
        ("a: !!float x", r"'x' is no float"),
        ("a: " + "[" * 50_000, r"nested deeper than 32 levels"),
        ("a: " + "{b: " * 50_000, r"nested deeper than 32 levels"),
        ("- " * 500, r"nested deeper than 32 levels"),
        (laughs(12), r"aliases make it more than 20,000 values"),
        ("[" + "1," * 30_000 + "]", r"more than 20,000 values"),
        ("a: &x [*x]", r"an alias stands inside of what it names"),
        ("a: *x", r"found undefined alias"),
        ('a: "\\ud800"', r"half of a surrogate pair"),
        ('"\\udfff": 1', r"half of a surrogate pair"),
        ("a: \x00", r"character 4 is 0x0000"),
        ("a: \udcff", r"character 4 is 0xdcff"),
        ("1: 2", r"line 1, column 1: a key must be a word"),
        ("? [a]\n: 2", r"a key must be a word"),
        ("a: [", r"line 1, column 5"),
        ("a: 1\n--- \nb: 2", r"line 2, column 1"),
        ("<<: 3", r"merging"),
        ("#" * (MAX_CHARS + 1), r"it has 1,048,577 characters; expected at most 1,048,576"),
    ],
)
def test_every_fault_says_what_and_where(text: str, message: str) -> None:
    with pytest.raises(YamlFault, match=message):
        parse_yaml(text)
