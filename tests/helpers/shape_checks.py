"""Checks of shapes and types at each call, where `--jaxtyping-packages` asks for them, at the least cost.

jaxtyping binds arguments by name and checks them twice, once more with what is returned: dear for a small function. One
without an array among its annotations has no shapes to bind; beartype alone says the same of its types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, get_args, get_type_hints

import jaxtyping

_with_shapes = jaxtyping.jaxtyped


def take_short_ways() -> None:
    """Let jaxtyping's import hook decorate by `checked` from here on."""
    jaxtyping.jaxtyped = checked


def checked(fn: Any = None, *, typechecker: Callable[[Any], Any] | None = None) -> Any:
    """Decorate as `jaxtyping.jaxtyped` does."""
    if fn is None:
        return lambda one: checked(one, typechecker=typechecker)
    if typechecker is None or not inspect.isfunction(fn) or _names_an_array(fn):
        return _with_shapes(fn, typechecker=typechecker)
    typed = typechecker(fn)

    @wraps(fn)
    def switched(*args: Any, **named: Any) -> Any:
        return (fn if jaxtyping.config.jaxtyping_disable else typed)(*args, **named)

    return switched


def _names_an_array(fn: Callable[..., Any]) -> bool:
    """True also where an annotation cannot be read yet."""
    try:
        hints = get_type_hints(fn)
    except (NameError, TypeError, AttributeError):
        return True
    return any(map(_holds_an_array, hints.values()))


def _holds_an_array(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_holds_an_array, get_args(hint)))
