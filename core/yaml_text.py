"""YAML as configs use it: plain values only, every key once, no more than a person writes.

PyYAML's safe loader lets the last of two equal keys win, reads `off` as false, makes dates and bytes of some
words, follows aliases into exponential sizes, and leaves int() and the recursion limit to fail on their own.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_CHARS = 1 << 20
"A config is a page or two; what is longer is some other file."
MAX_DEPTH = 32
MAX_NODES = 20_000
"Values after every alias is followed."

_PREFIX = "tag:yaml.org,2002:"
_MERGE = _PREFIX + "merge"
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_TAGS = {_PREFIX + name for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class YamlFault(ValueError):
    """Text that is no YAML of ours; the message says what and where, in one line."""


def parse_yaml(text: str) -> Any:
    """Return the values of one YAML document: mappings, lists, words, numbers, truth values, None.

    Raises YamlFault naming line and column.
    """
    if len(text) > MAX_CHARS:
        raise YamlFault(f"it has {len(text):,} characters; expected at most {MAX_CHARS:,}")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlFault(where + str(error.problem or error.context)) from None
    except yaml.reader.ReaderError as error:
        character = ord(error.character) if isinstance(error.character, str) else error.character
        raise YamlFault(f"character {error.position + 1} is {character:#06x}: {error.reason}") from None


class _Loader(yaml.SafeLoader):
    """YAML with 1.2's truth values: `off`, `on`, `yes`, `no` are words, so `policy: off` means what it says."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._num_nodes = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, counted with all that its aliases stand for."""
        mark = self.peek_event().start_mark
        if self._depth == MAX_DEPTH:
            raise _fault(f"values are nested deeper than {MAX_DEPTH} levels", mark)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _fault(f"more than {MAX_NODES:,} values", mark)
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and node not in self._sizes:
            raise _fault("an alias stands inside of what it names", mark)
        if not is_alias:
            self._check(node)
            self._sizes[node] = 1 + sum(self._sizes[child] for child in _children(node))
            if self._sizes[node] > MAX_NODES:
                raise _fault(f"aliases make it more than {MAX_NODES:,} values", mark)
        return node

    def _check(self, node: yaml.Node) -> None:
        if node.tag not in _PLAIN_TAGS | {_MERGE}:
            raise _fault(f"the tag '{node.tag.removeprefix(_PREFIX)}' is not read here", node.start_mark)
        if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
            raise _fault("an escape is half of a surrogate pair, which is no character", node.start_mark)
        if not isinstance(node, yaml.MappingNode):
            return
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == _MERGE:
                continue
            if key.tag != _PREFIX + "str" or not isinstance(key, yaml.ScalarNode):
                raise _fault("a key must be a word", key.start_mark)
            if key.value in lines:
                first = lines[key.value]
                raise _fault(f"the key '{key.value}' stands in line {first} already", key.start_mark)
            lines[key.value] = key.start_mark.line + 1

    def _construct_number(self, node: yaml.ScalarNode) -> Any:
        """A number or a truth value; `!!int x`, and digits beyond what int() takes, are faults with a place."""
        make = yaml.SafeLoader.yaml_constructors[node.tag]
        try:
            return make(self, node)
        except (ValueError, KeyError, IndexError, OverflowError):
            word = (
                node.value
                if len(node.value) <= 40
                else f"{node.value[:20]}... ({len(node.value)} characters)"
            )
            raise _fault(f"'{word}' is no {node.tag.removeprefix(_PREFIX)}", node.start_mark) from None


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _fault(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag in _PLAIN_TAGS - {_PREFIX + "bool"} | {_MERGE}
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_PREFIX + "bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
for _name in ("bool", "int", "float"):
    _Loader.add_constructor(_PREFIX + _name, _Loader._construct_number)
