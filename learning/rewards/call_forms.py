"""How a user's reward function is called: what each of its parameters is given, and what its result means.

Ours: prompt, response, reference and whatever else has a name of ours, by name; other words by their place. The
functions of TRL, verl and OpenRLHF are known by their parameters and called as their trainers call them. One that
takes lists is given all responses of a prompt, in the order of the sample index. Imports the standard library and
`core` only.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, SimpleNamespace
from typing import Any

from ...core.surfaces.surface import surface

PARTS, BAD, NONE = "parts", "bad", "none"
Answer = tuple[str, Any]

PLACES = ("prompt", "response", "reference")
"the arguments of a function of ours, in their order"
_COLUMNS_FIRST = ("token_ids", "iteration")
"a column of the data that has such a name goes before ours"
_OF_SAMPLE = ("prefill", "finish_reason", "num_tokens", "sample_index", "prompt_id", *_COLUMNS_FIRST)
EXTRAS = ("messages", "response_turns", *_OF_SAMPLE)
"what a function may ask for by name; response_turns: messages since the prompt, an environment's too"

_WORDS = {
    "prompt": "prompt question query instruction input problem",
    "response": "response completion output generation generated prediction predicted pred candidate reply answer "
    "solution",
    "reference": "reference ref gold golden truth target label expected gt answer solution",
}
_SAYS = {value: frozenset(words.split()) for value, words in _WORDS.items()}
_EITHER = _SAYS["response"] & _SAYS["reference"]
_UNKNOWN = "asks for '{name}', which is neither one of them nor a column that it is given"
_BY_NAME = (
    f"name its arguments {', '.join(PLACES)}, what else it needs of {', '.join(EXTRAS)}, and columns as "
    "data.reward_fields of every source names them, such as data.reward_fields: [difficulty]; what "
    "data.reference_field names is reference"
)
_MARKS = ("<|", "[/INST]", "<start_of_turn>", "### Response")


class CannotBeCalled(Exception):
    """A parameter that nothing is there for; `advice` says what to do."""

    def __init__(self, fault: str, advice: str = "") -> None:
        super().__init__(fault)
        self.advice = advice


@dataclass(frozen=True, slots=True)
class Foreign:
    """A signature of another trainer's, or ours with lists."""

    owner: str
    mark: str
    "the parameter that tells that it is this"
    values: Mapping[str, str]
    "its parameters by the names that we have for what they are given"
    in_lists: bool = True
    empty: tuple[str, ...] = ()
    "columns that are an empty dict where the data has none"


_VERL = {
    "solution_str": "response",
    "ground_truth": "reference",
    "data_source": "data_source",
    "extra_info": "extra_info",
}
_TRL = {
    "prompts": "prompt",
    "completions": "response",
    "completion_ids": "token_ids",
    "trainer_state": "trainer_state",
}
FOREIGN = (
    Foreign("TRL", "completions", _TRL),
    Foreign("OpenRLHF", "queries", {"queries": "query", "prompts": "prompt", "labels": "reference"}),
    Foreign("verl", "solution_str", _VERL, in_lists=False, empty=("extra_info",)),
    Foreign(
        "verl", "solution_strs", {f"{name}s": value for name, value in _VERL.items()}, empty=("extra_info",)
    ),
    Foreign("rlhfspec", "responses", {f"{name}s": name for name in PLACES}),
)


@dataclass(frozen=True, slots=True)
class Call:
    """How one function is called with the columns of a sample, or of all samples of a prompt."""

    function: Callable[..., Any]
    foreign: Foreign | None
    parameters: tuple[inspect.Parameter, ...]
    plans: dict[frozenset[str], dict[str, str]] = field(default_factory=dict)
    "parameter -> column, by the columns that are there"

    @property
    def in_lists(self) -> bool:
        """Whether it takes lists, of several responses."""
        return self.foreign is not None and self.foreign.in_lists

    def __call__(self, *rows: Mapping[str, Any]) -> Any:
        """Call it with the columns of each response. Raises CannotBeCalled, and what the function raises."""
        columns = rows[0]
        names = frozenset(columns)
        if names not in self.plans:
            self.plans[names] = self.plan(names)
        plan, args, kwargs, by_place = self.plans[names], [], {}, True
        for parameter in self.parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                args += [columns[name] for name in PLACES[len(args) :]] if by_place else []
            elif parameter.kind is parameter.VAR_KEYWORD:
                kwargs |= self._rest(rows, plan)
            elif parameter.name not in plan:
                by_place = False  # it has a default: whatever stands behind it goes by name
            elif by_place and parameter.kind is not parameter.KEYWORD_ONLY:
                args.append(self._value(rows, plan[parameter.name]))
            else:
                kwargs[parameter.name] = self._value(rows, plan[parameter.name])
        return self.function(*args, **kwargs)

    def plan(self, names: Collection[str] | None) -> dict[str, str]:
        """What each parameter is given, of the columns `names`; None: nobody knows them yet, and any may come.

        Raises CannotBeCalled.
        """
        return _foreign_plan(self, self.foreign, names) if self.foreign else _own_plan(self.parameters, names)

    def describe(self, names: Collection[str] | None, *, in_groups: bool = True) -> str:
        """Such as `with prompt, response, answer=reference`; `in_groups`: its lists hold a prompt's responses."""
        plan = self.plan(names)
        said = [
            parameter if parameter == value else f"{parameter}={value}" for parameter, value in plan.items()
        ]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters):
            said.append("all other columns of data.reward_fields" if self._takes_all else "")
        whose, alone = "", ""
        if self.foreign is not None:
            whose = f"as {self.foreign.owner} calls it, "
            if self.foreign.in_lists:
                size = "all samples of a prompt" if in_groups else "one"
                chats = " (messages where the prompt is a chat)" if self.foreign.owner == "TRL" else ""
                whose += f"in lists of {size}{chats}, "
                alone = (
                    ""
                    if in_groups
                    else "; it sees one response at a time, and cannot compare those of a prompt"
                )
        kept = [p.name for p in self.parameters if p.name not in plan and p.default is not p.empty]
        defaults = f"; left at their defaults: {', '.join(kept)}" if kept else ""
        return f"{whose}with {', '.join(filter(None, said)) or 'nothing'}{defaults}{alone}"

    def answer(self, result: Any, place: int = 0, count: int = 1) -> Answer:
        """What the result says of one of the responses that the call was given, as `plain`."""
        if self.foreign is None:
            return plain(result)
        if self.foreign.owner == "OpenRLHF" and isinstance(result, Mapping):
            return _with_parts(result, "rewards", lambda value: self._one_of(value, place, count))
        if self.foreign.in_lists:
            result, fault = self._one_of(result, place, count)
            if fault:
                return BAD, fault
        if self.foreign.owner == "verl" and isinstance(result, Mapping):
            return _with_parts(result, "score", lambda value: (value, ""))
        return plain(result)

    def _one_of(self, result: Any, place: int, count: int) -> tuple[Any, str]:
        """The reward at a place of a list of so many."""
        items = _listed(result)
        if len(items) == count:
            return items[place], ""
        assert self.foreign is not None
        size = "one response" if count == 1 else f"{count} responses"
        return None, (
            f"returned {_shown(result)} for a list of {size}, and a function of {self.foreign.owner}'s returns "
            "a list with one number for each response"
        )

    @property
    def _takes_all(self) -> bool:
        """Whether `**kwargs` take all columns."""
        return self.foreign is None or self.foreign.owner in ("TRL", "rlhfspec")

    def _value(self, rows: Sequence[Mapping[str, Any]], name: str) -> Any:
        """What a parameter is given: of each response in a list, or of the one that there is."""
        if name == "trainer_state":  # TRL's, one for the batch
            return SimpleNamespace(global_step=rows[0].get("iteration"))
        values = [self._of_one(columns, name) for columns in rows]
        return values if self.in_lists else values[0]

    def _of_one(self, columns: Mapping[str, Any], name: str) -> Any:
        value = columns.get(name)
        if self.foreign is None:
            return value
        if name == "query":
            value = columns["prompt"] + columns["response"]
        elif name in self.foreign.empty:
            value = value or {}
        elif self.foreign.owner == "TRL" and columns["messages"] and name in ("prompt", "response"):
            said = columns["response_turns"]
            before = columns["messages"][: len(columns["messages"]) - len(said) + 1]
            value = before if name == "prompt" else said
        return value

    def _rest(self, rows: Sequence[Mapping[str, Any]], plan: Mapping[str, str]) -> dict[str, Any]:
        """What `**kwargs` takes."""
        columns = rows[0]
        if self.foreign is None:
            taken = {*plan.values(), *(parameter.name for parameter in self.parameters)}
            if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in self.parameters):
                taken.update(PLACES)
            return {name: value for name, value in columns.items() if name not in taken}
        if not self._takes_all:
            return {}
        rest = {
            name: name for name in columns if name not in {*PLACES, *EXTRAS, *plan}.difference(_COLUMNS_FIRST)
        }
        asked = {parameter.name for parameter in self.parameters}
        rest |= {name: value for name, value in self.foreign.values.items() if name not in asked}
        return {name: self._value(rows, value) for name, value in rest.items()}


def call_of(function: Callable[..., Any]) -> Call:
    """How a function is called. One in C without a signature gets prompt, response and reference by place."""
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except ValueError:
        kind = inspect.Parameter.POSITIONAL_ONLY
        parameters = tuple(inspect.Parameter(name, kind) for name in PLACES)
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    parameters = tuple(parameter for parameter in parameters if parameter.name not in fixed)
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    foreign = next((form for form in FOREIGN if form.mark in names), None)
    if foreign is not None and foreign.owner == "OpenRLHF":
        marks = [mark for mark in _MARKS if any(mark in text for text in _texts(function))]
        if marks:
            raise CannotBeCalled(
                f"looks for '{marks[0]}' of a chat template, and texts come without the template",
                "let it take the response as it is",
            )
    return Call(function, foreign, parameters)


def _own_plan(parameters: Collection[inspect.Parameter], names: Collection[str] | None) -> dict[str, str]:
    known = {*PLACES, *EXTRAS, *(names or ())}
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    named = {p.name for p in parameters} & set(PLACES)
    plan: dict[str, str] = {}
    for parameter in parameters:
        name, place = parameter.name, by_place.index(parameter) if parameter in by_place else len(PLACES)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = PLACES[place] if place < len(PLACES) else None
        if name in known:
            if takes_rest and place < len(PLACES) and name != value:
                raise CannotBeCalled(f"takes '{name}' in the place of {value}, and *args behind it", _BY_NAME)
            plan[name] = name
        elif value is not None and value not in named and parameter.default in (parameter.empty, None, ""):
            _require_word(name, value, is_mixed=bool(named))
            plan[name] = value
        elif names is None and parameter.default is parameter.empty:
            plan[name] = name  # a column, it may be
        elif parameter.default is parameter.empty:
            raise CannotBeCalled(_UNKNOWN.format(name=name), _BY_NAME)
    if "reference" not in plan.values():
        for name in (name for name, value in plan.items() if value == "response"):
            if _EITHER & (words := set(_words(name))) and not (_SAYS["response"] - _EITHER) & words:
                raise CannotBeCalled(f"has '{name}', which may be the response or the reference", _BY_NAME)
    takes_more = takes_rest or any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_more and not {"response", "num_tokens", "finish_reason"} & set(plan.values()):
        raise CannotBeCalled("takes nothing of the response", _BY_NAME)
    return plan


def _words(name: str) -> list[str]:
    return name.lower().strip("_").split("_")


def _require_word(name: str, value: str, *, is_mixed: bool) -> None:
    """Raise CannotBeCalled where the word says something else than its place."""
    words = _words(name)
    said = {which for which, those in _SAYS.items() if those & set(words)}
    if len(words) == 1 and any(words[0] == f"{word}s" for those in _SAYS.values() for word in those):
        raise CannotBeCalled(
            f"asks for '{name}', a list as it seems, and is called once for each response; one that takes all of a "
            "prompt names its arguments prompts, responses, references",
            _BY_NAME,
        )
    if said and value not in said:
        raise CannotBeCalled(
            f"has '{name}', {' or '.join(sorted(said))} as it seems, in the place of {value}", _BY_NAME
        )
    is_free = max(map(len, words)) <= 2 or value == PLACES[-1]
    if is_mixed and not said and not is_free:
        raise CannotBeCalled(_UNKNOWN.format(name=name), _BY_NAME)


def _foreign_plan(call: Call, form: Foreign, names: Collection[str] | None) -> dict[str, str]:
    plan: dict[str, str] = {}
    for parameter in call.parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_needed = parameter.default is parameter.empty
        name = form.values.get(parameter.name, parameter.name)
        if name in (*PLACES, *EXTRAS, "query", "trainer_state") or name in (names or ()):
            plan[parameter.name] = name
        elif is_needed and (why := surface("reward.arguments").refused.get(name)):
            raise CannotBeCalled(f"asks for '{name}', and {why.partition('; ')[0]}", "give it a default")
        elif is_needed and (names is None or name in form.empty):
            plan[parameter.name] = name  # a column, it may be
        elif is_needed:
            raise CannotBeCalled(
                f"asks for the column '{name}', which it is not given",
                f"rows must have it, and data.reward_fields: [{name}] name it (Python names all that rows have)",
            )
    return plan


def _texts(function: Any) -> set[str]:
    """The string constants of a function's code, of functions inside it, and of those of its module that it names."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    found: set[str] = set()
    named, seen = getattr(function, "__globals__", {}), set[CodeType]()
    waiting: list[Any] = [getattr(function, "__code__", None)]
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, CodeType) and constant not in seen:
            seen.add(constant)
            waiting += constant.co_consts
            helpers = [named.get(name) for name in constant.co_names]
            own = [one for one in helpers if getattr(one, "__globals__", None) is named]
            waiting += [getattr(one, "__code__", None) for one in own]
        elif isinstance(constant, tuple | frozenset):
            waiting += constant
        elif isinstance(constant, str):
            found.add(constant)
    return found


def plain(result: Any) -> Answer:
    """A function's result as {"value": number, part: number, ...}, or what is wrong with it.

    Under "tokens" stands a tuple of a number for each token that was sampled; without a "value" their sum is it.
    """
    if result is None:
        return NONE, "returned None"
    if not isinstance(result, Mapping):
        number, fault = _finite(result)
        return (BAD, f"returned {fault}") if fault else (PARTS, {"value": number})
    parts: dict[str, Any] = {}
    if "tokens" in result:
        found = [_finite(token) for token in _listed(result["tokens"])]
        if not found or any(fault for _, fault in found):
            return BAD, f"returned for 'tokens' {_shown(result['tokens'])}, expected a list of finite numbers"
        parts["tokens"] = tuple(number for number, _ in found)
        result = {"value": math.fsum(parts["tokens"]), **{k: v for k, v in result.items() if k != "tokens"}}
    if fault := _lack(result, "value"):
        return BAD, fault
    for name, value in result.items():
        number, fault = _finite(value)
        if fault:
            return BAD, f"returned for '{name}' {fault}"
        parts[str(name)] = number
    return PARTS, parts


def _listed(result: Any) -> list[Any]:
    """What a list, array or tensor holds; of anything else nothing."""
    try:
        return [] if isinstance(result, str | bytes | Mapping) else list(result)
    except TypeError:  # no list, or a tensor without dimensions
        return []


def _with_parts(result: Mapping[Any, Any], key: str, alone: Callable[[Any], tuple[Any, str]]) -> Answer:
    """A dict of another trainer's: the reward under `key`; other numbers are parts, texts and dicts are left out."""
    logs = result.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        return BAD, f"returned for 'extra_logs' {_shown(logs)}, expected a dict of numbers"
    rest = {**{name: part for name, part in result.items() if name not in (key, "extra_logs")}, **logs}
    if "value" in rest:
        return BAD, f"returned 'value' beside '{key}', and one of them is the reward"
    if fault := _lack({**rest, **result}, key):
        return BAD, fault
    value, fault = alone(result[key])
    if fault:
        return BAD, fault
    kind, content = plain(value)
    if kind != PARTS:
        return kind, f"{content} under '{key}'"
    for name, part in rest.items():
        item, is_no_list = alone(part)
        item = part if is_no_list else item
        if item is None or isinstance(item, str | bytes | Mapping):
            continue
        number, fault = _finite(item)
        if fault:
            return BAD, f"returned for '{name}' {fault}"
        content[str(name)] = number
    return PARTS, content


def _lack(result: Mapping[Any, Any], key: str) -> str:
    """What is wrong with a dict's keys; empty: nothing."""
    if key not in result:
        return f"returned a dict without '{key}', with the keys {sorted(map(str, result))}"
    found = (surface("reward.result").fault(str(name), value) for name, value in result.items())
    return next((f"returned a dict with {fault.text}" for fault in found if fault), "")


def _finite(value: Any) -> tuple[float, str]:
    """The number, or what stands in its place."""
    if isinstance(value, str | bytes | bytearray):
        return 0.0, f"{_shown(value)}, a {type(value).__name__}"
    try:
        number = float(value)
    except Exception:  # whatever the user's class does
        return 0.0, _shown(value)
    return (number, "") if math.isfinite(number) else (0.0, str(number))


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # whatever the user's class does
        return f"a {type(value).__name__}"
