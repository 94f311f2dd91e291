"""What a launch script starts its trainer with, read without running it.

Assignments, arrays, arithmetic and `${NAME:-default}` are followed. What only a shell could know ($1, $(command)) stays
as it stands. In branches (if, case) the first assignment counts; others, and what is appended, are named, not taken.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rlhfspec.core.yaml_text import YamlFault, parse_yaml

_PIECE = re.compile(
    r"""(?P<space>\\\n|[ \t\r]+)
    |(?P<comment>(?<![^\s(;])\#[^\n]*)
    |(?P<end>\n|;+|(?<=\s)\d?>+(?:&\d)?|&+|\|+|<+-?|>+)
    |(?P<open>\()|(?P<close>\))
    |'(?P<single>[^']*)'
    |"(?P<double>(?:\\.|\$\([^()]*\)|[^"\\])*)"
    |(?P<command>\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))
    |(?P<variable>\$\{(?:[^{}]|\{[^{}]*\})*\}|\$\w+|\$[@*\#?!-])
    |(?P<plain>\\.|[^\s'"$()\#;&|<>\\]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_VARIABLE = re.compile(
    r"\\(?P<escaped>.)|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\$\{(?:[^{}]|\{[^{}]*\})*\}|\$\w+",
    re.DOTALL,
)
_NAMED = re.compile(r"(?P<name>\w+)(?P<all>\[[@*]\])?(?::?[-=](?P<default>.*))?", re.DOTALL)
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=")
_BEGINS, _ENDS = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
_BEFORE = {"then", "else", "elif", "do", "export", "local", "declare", "readonly"}
"What may stand before an assignment."
_STARTERS = {"torchrun", "accelerate", "deepspeed"}
_OPERATORS: Mapping[type, Callable[[int, int], int]] = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
)


@dataclass(slots=True)
class Launch:
    """One launch command."""

    program: str
    "the module or script that is started"
    words: list[str]
    "behind it"
    launcher: list[str] = field(default_factory=list)
    "before it, where torchrun or the like starts it"
    branched: list[str] = field(default_factory=list)
    "what branches of the script assign anew, or append to its arrays"


@dataclass(slots=True)
class _Shell:
    is_program: Callable[[str], bool]
    scalars: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    branched: list[str] = field(default_factory=list)
    quoted: set[str] = field(default_factory=set)
    "words that were read as commands"
    depth: int = 0
    launch: Launch | None = None

    def expand(self, text: str) -> str:
        """A text between double quotes, with what is known of its variables."""
        return _VARIABLE.sub(
            lambda found: self.value(found[0]) if found["escaped"] is None else _unescaped(found["escaped"]),
            text,
        )

    def value(self, text: str) -> str:
        """Of one `$...`."""
        if text.startswith("$(("):
            names = re.compile(r"[A-Za-z_]\w*")
            return _arithmetic(names.sub(lambda one: self.value(f"${one[0]}"), self.expand(text[3:-2])), text)
        named = _NAMED.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if named is None or text.startswith("$("):
            return text
        name, default = named["name"], named["default"]
        if name == "HOME":
            return "~"
        known = self.scalars.get(name, "")
        if not known and default is not None:
            return self.expand(
                default[1:-1] if default[:1] in {'"', "'"} and default[:1] == default[-1:] else default
            )
        return known if name in self.scalars else text

    def run(self, words: list[str]) -> None:
        """One statement."""
        while words and words[0] in _BEFORE:
            words = words[1:]
        if words:
            self.depth += (words[0] in _BEGINS) - (words[0] in _ENDS)
        if words and _are_assignments(words):
            for word in words:
                name, _, text = word.partition("=")
                known = self.scalars.get(name.removesuffix("+"))
                if known and self.depth and known != text:
                    self.branched.append(word)
                elif name.endswith("+"):
                    self.scalars[name[:-1]] = (known or "") + text
                else:
                    self.scalars[name] = text
            return
        if self.launch is not None:
            return
        place = next((index for index, word in enumerate(words) if self.is_program(word)), None)
        if place is None:
            for word in words:
                if word not in self.quoted and any(map(self.is_program, word.split()[1:])):  # bash -c "..."
                    self.quoted.add(word)
                    self.read(word)
        else:
            before = words[:place]
            start = next((index for index, word in enumerate(before) if word in _STARTERS), len(before))
            self.launch = Launch(words[place], words[place + 1 :], before[start + 1 :], self.branched)

    def assign_array(self, name: str, words: list[str], *, is_more: bool) -> None:
        """`NAME=(...)` or `NAME+=(...)`."""
        if self.depth and (is_more or self.arrays.get(name)):
            self.branched += [word for word in words if "=" in word or word.startswith("--")]
        elif is_more:
            self.arrays.setdefault(name, []).extend(words)
        else:
            self.arrays[name] = words

    def read(self, text: str) -> None:
        """All statements of a text."""
        words: list[str] = []
        array: str | None = None
        word: str | None = None

        for found in _PIECE.finditer(text + "\n"):
            kind, piece = found.lastgroup, found[found.lastgroup or 0]
            is_end = kind in ("space", "comment", "end", "open", "close")
            if kind == "open" and word is not None and _ASSIGNED.fullmatch(word):
                array, word, words = word, None, []
                continue
            if is_end and word is not None:
                words.append(word)
                word = None
            if kind == "close" and array is not None:
                assigned = _ASSIGNED.fullmatch(array)
                if assigned is not None:
                    self.assign_array(assigned["name"], words, is_more=bool(assigned["more"]))
                array, words = None, []
            elif kind in ("end", "open", "close"):
                if array is None:
                    self.run(words)
                    words = []
            elif is_end:
                continue
            elif kind == "single":
                word = (word or "") + piece
            elif kind == "plain":
                word = (word or "") + piece.removeprefix("\\")
            elif kind == "command" or (kind == "double" and _whole_array(piece, self) is None):
                word = (word or "") + (self.value(piece) if kind == "command" else self.expand(piece))
            else:
                parts = _whole_array(piece, self)
                if parts is None:
                    value = self.value(piece)
                    parts = [value] if "$" in value else value.split()
                if array is None and word is not None and _are_assignments([*words, word]):
                    word += " ".join(parts)
                elif parts:
                    *before, word = [(word or "") + parts[0], *parts[1:]]
                    words += before


def read_launch(text: str, is_program: Callable[[str], bool]) -> Launch | None:
    """The first command of a script of which a word is a program that is looked for; None where there is none."""
    shell = _Shell(is_program)
    shell.read(text)
    return shell.launch


def _are_assignments(words: list[str]) -> bool:
    return all(_ASSIGNED.match(word) or word in _BEFORE for word in words)


def _whole_array(piece: str, shell: _Shell) -> list[str] | None:
    """What `${NAME[@]}` alone stands for; a scalar there is split as a shell would."""
    if piece in ("$@", "$*"):
        return []
    named = _NAMED.fullmatch(piece[2:-1]) if piece.startswith("${") and piece.endswith("}") else None
    if named is None or not named["all"]:
        return None
    return list(shell.arrays.get(named["name"], ()))


def _unescaped(letter: str) -> str:
    """What a backslash and a letter mean between double quotes; with the end of a line, nothing."""
    return "" if letter == "\n" else letter if letter in '$`"\\' else f"\\{letter}"


def _arithmetic(text: str, whole: str) -> str:
    """Sums, products and quotients of whole numbers; anything else stays as it stands."""
    try:
        return str(_number(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError):
        return whole


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise TypeError(node)


def scalar(text: str) -> Any:
    """A word of a command line as a value: number, truth value, null, list, or the word itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] in "[{" and text:
        try:
            return parse_yaml(text)
        except YamlFault:
            return text
    return text


def flags(words: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name a b` (a list) and `--name` alone (true)."""
    found: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--") or (word.startswith("-") and word[1:2].isalpha()):
            name, sign, text = word.lstrip("-").partition("=")
            found[name] = scalar(text) if sign else True
        elif name is not None:
            value, before = scalar(word.rstrip(",")), found[name]
            found[name] = (
                value if before is True else [*(before if isinstance(before, list) else [before]), value]
            )
    return found
