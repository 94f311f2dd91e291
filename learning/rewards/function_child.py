"""The process in which a user's reward function runs: a call that hangs or crashes takes nobody else with it.

Imports the standard library only, besides what the user's module does: it starts in a few hundredths of a second.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ...core.errors import ConfigError
from ...core.named_code import describe, file_of, give_way, named_code, place_of
from ...core.proc_files import end_with
from .call_forms import BAD, PLACES, Answer, Call, CannotBeCalled, call_of

READY, CANNOT_IMPORT = "ready", "cannot import"


def main(descriptor: int, parent: int) -> None:
    """Import the function that the parent names, then answer calls until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's, which ends this process
    end_with(parent, signal.SIGKILL)
    parent_end = Connection(descriptor)
    kind, argument, fields, scope, folders = parent_end.recv()
    give_way(folders)
    described = ""
    try:
        if kind == "format":
            invoke = call_of(format_function(argument))
        else:
            invoke, described = import_function(argument, fields, scope)
    except ConfigError as error:
        parent_end.send((CANNOT_IMPORT, str(error)))
        return
    in_groups = invoke.in_lists and scope != "sample"
    parent_end.send((READY, (is_async(invoke.function), in_groups, described)))
    own = os.getpid()

    def answer(what: Any) -> None:
        if os.getpid() != own:
            os._exit(0)  # a fork that the function left running: only one may answer
        parent_end.send(what)

    try:
        while True:
            timeout_s, batch = parent_end.recv()
            if timeout_s is not None:
                asyncio.run(_together(invoke, batch, timeout_s, answer))
                continue
            for place, rows in enumerate(batch):
                answer((place, _called(invoke, rows)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calls of it give coroutines, which can wait beside one another."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _together(
    call: Call,
    batch: Sequence[Sequence[dict[str, Any]]],
    timeout_s: float,
    send: Callable[[Any], None],
) -> None:
    """All calls of a batch at once, each with a limit of its own; (place, answers) is sent as they end."""

    async def one(place: int, rows: Sequence[dict[str, Any]]) -> None:
        limit = asyncio.timeout(timeout_s * len(rows))
        try:
            async with limit:
                answers = _answers(call, await call(*rows), len(rows))
        except (Exception, SystemExit) as error:
            fault = late(timeout_s, len(rows)) if limit.expired() else _raised(error)
            answers = [(BAD, fault)] * len(rows)
        send((place, answers))

    await asyncio.gather(*(one(place, rows) for place, rows in enumerate(batch)))


def late(timeout_s: float, count: int) -> str:
    """Of a call that was given so many responses."""
    each = (
        "" if count == 1 else f" for each of the {count} responses of the prompt, which it is given together"
    )
    return f"did not return within reward.timeout_s ({timeout_s:g} s{each})"


def _answers(call: Call, result: Any, count: int) -> list[Answer]:
    return [call.answer(result, place, count) for place in range(count)]


def _raised(error: BaseException) -> str:
    if isinstance(error, CannotBeCalled):
        return f"{error}; {error.advice}"
    return f"raised {type(error).__name__}: {describe(error)} ({place_of(error)})"


def _called(call: Call, rows: Sequence[dict[str, Any]]) -> list[Answer]:
    try:
        result = call(*rows)
        if inspect.isawaitable(result):
            result = asyncio.run(asyncio.wait_for(result, None))
        return _answers(call, result, len(rows))
    # the user's code may raise anything, and sys.exit is no end of ours
    except (Exception, SystemExit) as error:
        return [(BAD, _raised(error))] * len(rows)


def format_function(pattern: str) -> Callable[..., float]:
    """1.0 for a response that the pattern matches as a whole, alone or behind what the prompt began it with; else 0."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(prompt: str, response: str, reference: str, prefill: str) -> float:
        return float(
            any(
                compiled.fullmatch(text) is not None for text in dict.fromkeys((prefill + response, response))
            )
        )

    return score


def import_function(path: str, fields: Sequence[str] | None = (), scope: str = "auto") -> tuple[Call, str]:
    """The function `package.module:function`, which may ask for `fields` too; None: for any, as nobody knows them yet.

    Returns how it is called, and a line that says so and names its file. Raises ConfigError.
    """
    function = named_code(
        path,
        key="reward.kind",
        kind="function",
        example="my_rewards:score for the function score in my_rewards.py",
    )
    name = path.partition(":")[2]
    if not callable(function):
        raise ConfigError(f"reward.kind {path}: '{name}' is {type(function).__name__}, not a function")
    if inspect.isclass(function):
        function = _made(path, name, function)
    try:
        call = call_of(function)
        given = call.describe(fields, in_groups=scope != "sample")
    except CannotBeCalled as error:
        raise ConfigError(
            f"reward.kind {path}: '{name}' cannot be called as {name}({', '.join(PLACES)}): it {error}; "
            f"{error.advice}; or write around it def score({', '.join(PLACES)}): return {name}(...)"
        ) from error
    if scope == "group" and not call.in_lists:
        raise ConfigError(
            f"reward.kind {path}: reward.scope is group, and '{name}' takes one response and no lists; name its "
            "arguments prompts, responses, references, or set reward.scope: auto"
        )
    return call, f"{path} of {_file(function)}, called {given}"


def _made(path: str, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """An object of a class whose objects are called, as a reward that keeps what it loads once."""
    advice = f"write an object behind the class, such as scorer = {name}(...), and name that"
    if not inspect.isfunction(inspect.getattr_static(made, "__call__", None)):
        raise ConfigError(f"reward.kind {path}: '{name}' is a class whose objects cannot be called; {advice}")
    try:
        return made()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ConfigError(f"reward.kind {path}: {name}() {_raised(error)}; {advice}") from error


def _file(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    place = function if hasattr(function, "__module__") else type(function)
    module = sys.modules.get(getattr(place, "__module__", None) or "")
    return file_of(module) if module is not None else "no file known"
