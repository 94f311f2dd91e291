"""The process in which a user's reward function runs: a call that hangs or crashes takes nobody else with it.

Imports the standard library only, besides what the user's module does: it starts in a few hundredths of a second.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from core.errors import ConfigError
from core.named_code import describe, named_code, place_of

PARTS, BAD, NONE = "parts", "bad", "none"
READY, CANNOT_IMPORT = "ready", "cannot import"

EXTRAS = ("messages", "finish_reason", "num_tokens", "sample_index", "prompt_id")
"what a function may ask for by name"
_POSITIONAL = ("prompt", "response", "reference")
_SET_DEATH_SIGNAL = 1


def main(descriptor: int, parent: int) -> None:
    """Import the function that the parent names, then answer calls until it hangs up."""
    _die_with(parent)
    parent_end = Connection(descriptor)
    kind, argument, fields = parent_end.recv()
    try:
        function = format_function(argument) if kind == "format" else import_function(argument, fields)
    except ValueError as error:
        parent_end.send((CANNOT_IMPORT, str(error)))
        return
    parent_end.send((READY, is_async(function)))
    call = caller(function)
    own = os.getpid()

    def answer(what: Any) -> None:
        if os.getpid() != own:
            os._exit(0)  # a fork that the function left running: only one may answer
        parent_end.send(what)

    try:
        while True:
            order = parent_end.recv()
            if isinstance(order, tuple):
                timeout_s, batch = order
                asyncio.run(_together(bound(function), batch, timeout_s, answer))
                continue
            for columns in order:
                answer(call(columns))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calls of it give coroutines, which can wait beside one another."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _together(
    invoke: Callable[[dict[str, Any]], Any],
    batch: Sequence[dict[str, Any]],
    timeout_s: float,
    send: Callable[[Any], None],
) -> None:
    """All calls of a batch at once, each with a limit of its own; (place, answer) is sent as they end."""

    async def one(place: int, columns: dict[str, Any]) -> None:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                answer = plain(await invoke(columns))
        except (Exception, SystemExit) as error:
            late = f"did not return within reward.timeout_s ({timeout_s:g} s)"
            answer = (BAD, late if limit.expired() else _raised(error))
        send((place, answer))

    await asyncio.gather(*(one(place, columns) for place, columns in enumerate(batch)))


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {describe(error)} ({place_of(error)})"


def bound(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """The function with what it asks for by name beside prompt, response and reference."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function of C without a signature
        parameters = []
    # the three that go by place, whatever the function calls them
    by_place = {p.name for p in parameters[:3] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY} - by_place

    def invoke(columns: dict[str, Any]) -> Any:
        columns = dict(columns)
        given = [columns.pop(name) for name in _POSITIONAL]
        extras = {name: value for name, value in columns.items() if name in wanted or takes_all}
        for name in by_place:
            extras.pop(name, None)
        return function(*given, **extras)

    return invoke


def caller(function: Callable[..., Any]) -> Callable[[dict[str, Any]], tuple[str, Any]]:
    """One call of it after the other, whatever it does."""
    invoke = bound(function)

    def call(columns: dict[str, Any]) -> tuple[str, Any]:
        try:
            result = invoke(columns)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            return plain(result)
        # the user's code may raise anything, and sys.exit is no end of ours
        except (Exception, SystemExit) as error:
            return BAD, _raised(error)

    return call


def plain(result: Any) -> tuple[str, Any]:
    """A function's result as {"value": number, part: number, ...}, or what is wrong with it."""
    if result is None:
        return NONE, "returned None"
    if not isinstance(result, Mapping):
        number, fault = _finite(result)
        return (BAD, f"returned {fault}") if fault else (PARTS, {"value": number})
    if "value" not in result:
        return BAD, f"returned a dict without 'value', with the keys {sorted(map(str, result))}"
    parts = {}
    for name, value in result.items():
        number, fault = _finite(value)
        if fault:
            return BAD, f"returned for '{name}' {fault}"
        parts[str(name)] = number
    return PARTS, parts


def _finite(value: Any) -> tuple[float, str]:
    """The number, or what stands in its place."""
    shown = repr(value)[:80]
    if isinstance(value, str | bytes):
        return 0.0, f"{shown}, a {type(value).__name__}"
    try:
        number = float(value)
    except Exception:  # whatever the user's class does
        return 0.0, shown
    return (number, "") if math.isfinite(number) else (0.0, str(number))


def format_function(pattern: str) -> Callable[..., float]:
    """1.0 for a response that the pattern matches as a whole, else 0.0."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(prompt: str, response: str, reference: str) -> float:
        return float(compiled.fullmatch(response) is not None)

    return score


def import_function(path: str, fields: Sequence[str] | None = ()) -> Callable[..., Any]:
    """The function `package.module:function`, which may ask for `fields` too; None: for any, as nobody knows them yet.

    Raises ValueError saying what is wrong with it.
    """
    try:
        function = named_code(
            path,
            key="reward.kind",
            kind="function",
            example="my_rewards:score for the function score in my_rewards.py",
        )
    except ConfigError as error:
        raise ValueError(str(error)) from error
    name = path.partition(":")[2]
    if not callable(function):
        raise ValueError(f"reward.kind {path}: '{name}' is {type(function).__name__}, not a function")
    _require_three_arguments(path, name, function, fields)
    return function


def _require_three_arguments(
    path: str, name: str, function: Callable[..., Any], fields: Sequence[str] | None
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function of C without a signature; its first call will tell
    extras = {p.name: None for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    places = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][3:]
    known = {*EXTRAS, *(fields or ())}
    given = {name: None for name in (*extras, *places) if name in known or fields is None}
    try:
        signature.bind(*_POSITIONAL, **given)
    except TypeError as error:
        raise ValueError(
            f"reward.kind {path}: '{name}' cannot be called as {name}(prompt, response, reference): {error}; "
            f"give it these three arguments, and by name what it needs of {', '.join(EXTRAS)} and the "
            "columns that data.reward_fields of every source names"
        ) from error


def _die_with(parent: int) -> None:
    """End when the parent does, even inside a call that never returns (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's, which ends this process
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
