"""Waiting for other processes: every wait has an end, and every failure arrives as our own error.

`RayTaskError` is unwrapped to the error that was raised on the other side; a dead actor becomes
`ActorDied`, a silent one `WaitTimeout`, both naming who waited for whom and for what. Long waits are told on the
way (`actors.waiting.watch`), and a dead Ray node is not mistaken for a dead actor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from rlhfspec.actors.waiting.deaths import DEATHS, cause_of
from rlhfspec.actors.waiting.node import require_node, require_raylet
from rlhfspec.actors.waiting.watch import LOOK_S, SLEPT_S, OpenWait
from rlhfspec.core.errors import InstanceLost, RlhfSpecError, WaitTimeout


class ActorDied(InstanceLost):
    """The other side of a call died, or cannot be reached any more; raised on this side only."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name
        "who died"


def get(ref: Any, *, waiter: str, waited_for: str, order: str, timeout_s: float) -> Any:
    """Wait for one answer or a list of them; what takes unusually long is told to the watch.

    Raises:
        WaitTimeout: no answer within `timeout_s`, own pauses of this process left out.
        ActorDied: the other side died.
        NodeDied: the Ray node under this process died.
        RlhfSpecError: whatever the other side raised, as itself.
    """
    wait = OpenWait(waiter=waiter, waited_for=waited_for, order=order, timeout_s=timeout_s)
    while True:
        require_raylet()
        try:
            answer = _get_awake(ref, wait)
        except GetTimeoutError:
            wait.look()
            require_node()
            if wait.left_s > 0.0:
                continue
            raise no_answer(waiter, waited_for, order, wait.waited_s) from None
        except DEATHS as error:
            require_node(error)
            raise ActorDied(
                f"{waited_for} died while {waiter} waited for '{order}': {cause_of(error)}", waited_for
            ) from None
        except RayTaskError as error:
            raise own_error(error) from None
        wait.answered()
        return answer


def no_answer(waiter: str, waited_for: str, order: str, waited_s: float) -> WaitTimeout:
    """The error of a wait for actors that ran out of time."""
    return WaitTimeout(
        waiter=waiter,
        waited_for=waited_for,
        order=order,
        waited_s=waited_s,
        advice="raise the timeout in the section cluster of the config if it is only slow, "
        "else look at its log in the Ray dashboard",
    )


def _get_awake(ref: Any, wait: OpenWait) -> Any:
    """Look for the answer for a second at most. Raises what `ray.get` raises."""
    began_s, limit_s = time.monotonic(), min(LOOK_S, wait.left_s)
    refs = list(ref) if isinstance(ref, (list, tuple)) else [ref]
    try:
        # looked at and not fetched: a `get` that ends early drops what it has of a large object
        ready = ray.wait(refs, num_returns=len(refs), timeout=limit_s, fetch_local=False)[0] if refs else []
        if len(ready) < len(refs):
            wait.overslept(time.monotonic() - began_s - limit_s)
            raise GetTimeoutError
    finally:
        late_s = time.monotonic() - began_s - limit_s
        _pauses.seconds += late_s if late_s > SLEPT_S else 0.0
    return ray.get(ref, timeout=max(wait.left_s, LOOK_S))


class _Pauses:
    seconds = 0.0


_pauses = _Pauses()


def awake_s() -> float:
    """Seconds of a monotonic clock that leaves out what this process slept through while it waited."""
    return time.monotonic() - _pauses.seconds


def own_error(error: RayTaskError) -> BaseException:
    """Return what was raised on the other side: our own errors bare, others with their traceback."""
    return error.cause if isinstance(error.cause, RlhfSpecError) else error


def wait_any(refs: Sequence[Any], *, timeout_s: float) -> list[Any]:
    """Return the refs that are ready, waiting up to `timeout_s` for the first. Raises NodeDied."""
    require_raylet()
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
    if not ready:
        return []
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return ready
