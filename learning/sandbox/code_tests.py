"""Tests of programs as data sets have them: pairs of stdin and stdout, calls with their results, asserts.

Forms: a list of {input, output}, `inputs` and `outputs` with or without `fn_name` (APPS, Hendrycks et al. 2021, and
verl's prime_code), asserts as text or a list of them (MBPP), `check(candidate)` with its `entry_point` (HumanEval).
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import RewardError

_FENCED = re.compile(
    r"(?:```|~~~)[ \t]*((?:python|py)3?\b[^\n]*|[ \t\r]*)\n(.*?)(?:^[ \t]*(?:```|~~~)|\Z)",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
"A label, of Python or none, and what is fenced."
_EXPECTED = (
    'expected a list of {"input", "output"}, {"inputs", "outputs"} with "fn_name" where a function is called, asserts, '
    'or {"test", "entry_point"}'
)
_CALL = (
    "import json as _json, os as _os\n"
    "_of = globals().get('Solution')\n"
    "_got = (getattr(_of(), {name!r}) if _of else globals()[{name!r}])(*_json.loads({arguments!r}))\n"
    "_os.write(1, ({mark!r} + _json.dumps(_got)).encode())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One test of a program."""

    stdin: str = ""
    expected: str | None = None
    "what it writes, but for white space at ends of lines and of the text"
    asserts: str = ""
    "statements that stand behind it and raise where it is wrong"
    function: str = ""
    "that is called with `arguments`, of it or of its class Solution"
    arguments: str = "[]"
    "JSON"
    result: Any = None
    "of that call, as JSON values"

    def program(self, source: str, mark: str) -> str:
        """What is run; `mark` is written where it has come to its end."""
        if self.expected is not None or not _is_whole(source):
            return source
        if self.function:
            return f"{source}\n{_CALL.format(name=self.function, arguments=self.arguments, mark=mark)}\n"
        return f"{source}\n{self.asserts}\n__import__('os').write(1, {mark!r}.encode())\n"

    def is_passed(self, stdout: str, mark: str) -> bool:
        """Whether a program that ended with 0 wrote what is right."""
        if self.expected is not None:
            return _lines(stdout) == _lines(self.expected)
        _, marked, said = stdout.rpartition(mark)
        if not marked or not self.function:
            return bool(marked)
        try:
            got = json.JSONDecoder().raw_decode(said)[0]
        except (ValueError, RecursionError):
            return False
        # LiveCodeBench writes results as JSON, APPS in lists of one
        right = [self.result, _decoded(self.result)]
        return got in right or [got] in right


def _is_whole(source: str) -> bool:
    """Whether nothing that stands behind it could be taken for a part of it."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not source.rstrip(" \t\f").endswith("\\")


def new_mark() -> str:
    """A text that no program knows before it is run; one that looks for it while it runs may find it."""
    return f"<{secrets.token_hex(16)}>"


def program_of(response: str) -> str:
    """The last block that is fenced as Python, else the last without a label, else the whole response."""
    found = _FENCED.findall(response)
    labelled = [block for label, block in found if label.strip()]
    blocks = labelled or [block for _, block in found]
    return textwrap.dedent(blocks[-1]) if blocks else response


def read_tests(given: Any, entry_point: Any = None) -> list[CodeTest]:
    """The tests in a row's reference or column; `entry_point`: the row's. Raises RewardError: there are none in it."""
    value = given
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(given)
        except ValueError as error:
            raise RewardError(f"is no JSON ({error}); {_EXPECTED}") from None
    try:
        tests = _tests(value, entry_point)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise RewardError(f"cannot be read ({type(error).__name__}: {error}); {_EXPECTED}") from None
    if not tests:
        raise RewardError(f"holds no test; {_EXPECTED}")
    return tests


def _tests(value: Any, entry_point: Any) -> list[CodeTest]:
    if isinstance(value, str):
        return _asserts(value, entry_point)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return [test for one in value for test in _asserts(one, entry_point)]
    if isinstance(value, list):
        pairs = [_known(one, "input", "output") for one in value]
        return [_pair(one["input"], one["output"]) for one in pairs]
    if isinstance(value, dict) and "test" in value:
        found = _known(value, "test", "entry_point")
        return _asserts(found["test"], found.get("entry_point", entry_point))
    found = _known(value, "inputs", "outputs", "fn_name")
    pairs = list(zip(found["inputs"], found["outputs"], strict=True))
    if name := found.get("fn_name"):
        return [
            CodeTest(function=name, arguments=json.dumps(_arguments(one)), result=result)
            for one, result in pairs
        ]
    return [_pair(one, result) for one, result in pairs]


def _known(value: Any, *names: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.60} is no object")
    if unknown := value.keys() - set(names):
        raise ValueError(f"nothing reads {sorted(unknown)}")
    return value


def _pair(stdin: Any, stdout: Any) -> CodeTest:
    texts = ["\n".join(one) if isinstance(one, list) else one for one in (stdin, stdout)]
    if not all(isinstance(one, str) for one in texts):
        raise TypeError(f"a test's input and output are texts, got {stdin!r:.60} and {stdout!r:.60}")
    return CodeTest(stdin=texts[0], expected=texts[1])


def _arguments(given: Any) -> list[Any]:
    """Of one call: a list, or a text with one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list):
        raise TypeError(f"a call's arguments are a list, got {given!r:.60}")
    return given


def _decoded(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given


def _asserts(text: str, entry_point: Any) -> list[CodeTest]:
    """One test an assert where there is nothing else; a `check` that nobody calls is called."""
    body = ast.parse(text).body
    names = {one.name for one in body if isinstance(one, ast.FunctionDef)}
    is_called = any(
        isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Call)
        and ast.unparse(one.value.func) == "check"
        for one in body
    )
    if "check" in names and not is_called:
        if not isinstance(entry_point, str) or not entry_point.isidentifier():
            raise ValueError(
                "check(candidate) is called with the row's entry_point; name it in data.reward_fields"
            )
        return [CodeTest(asserts=f"{text}\ncheck({entry_point})")]
    if not is_called and not any(isinstance(one, ast.Assert) for one in ast.walk(ast.parse(text))):
        raise ValueError(f"{text!r:.60} holds no assert")
    if all(isinstance(one, ast.Assert) for one in body):
        return [CodeTest(asserts=ast.unparse(one)) for one in body]
    return [CodeTest(asserts=text)]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
