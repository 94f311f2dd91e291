"""Waiting for other processes: every wait has an end, and every failure arrives as our own error.

`RayTaskError` is unwrapped to the error that was raised on the other side; a dead actor becomes
`ActorDied`, a silent one `WaitTimeout`, both naming who waited for whom and for what.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from core.errors import InstanceLost, RlhfSpecError, WaitTimeout


class ActorDied(InstanceLost):
    """The other side of a call died, or cannot be reached any more; raised on this side only."""


def get(ref: Any, *, waiter: str, waited_for: str, order: str, timeout_s: float) -> Any:
    """Wait for one answer or a list of them.

    Raises:
        WaitTimeout: no answer within `timeout_s`.
        ActorDied: the other side died.
        RlhfSpecError: whatever the other side raised, as itself.
    """
    began_s = time.monotonic()
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise WaitTimeout(
            waiter=waiter,
            waited_for=waited_for,
            order=order,
            waited_s=time.monotonic() - began_s,
            advice="raise the timeout in the section cluster of the config if it is only slow, "
            "else look at its log in the Ray dashboard",
        ) from None
    except RayActorError as error:
        raise ActorDied(
            f"{waited_for} died while {waiter} waited for '{order}': {first_line(error)}; "
            "look at its log in the Ray dashboard (out of memory is the usual reason)"
        ) from None
    except RayTaskError as error:
        raise own_error(error) from None


def own_error(error: RayTaskError) -> BaseException:
    """Return what was raised on the other side: our own errors bare, others with their traceback."""
    return error.cause if isinstance(error.cause, RlhfSpecError) else error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def wait_any(refs: Sequence[Any], *, timeout_s: float) -> list[Any]:
    """Return the refs that are ready, waiting up to `timeout_s` for the first."""
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
    if not ready:
        return []
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return ready
