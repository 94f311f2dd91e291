"""Waiting for other processes: every wait has an end, and every failure arrives as our own error.

`RayTaskError` is unwrapped to the error that was raised on the other side; a dead actor becomes
`ActorDied`, a silent one `WaitTimeout`, both naming who waited for whom and for what. Long waits are told on the
way (`actors.watch`), and a dead Ray node is not mistaken for a dead actor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.deaths import DEATHS, OWN_NODE_DIED, cause_of
from actors.watch import LOOK_S, SLEPT_S, OpenWait
from core.errors import InstanceLost, NodeDied, RlhfSpecError, WaitTimeout


class ActorDied(InstanceLost):
    """The other side of a call died, or cannot be reached any more; raised on this side only."""


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
        try:
            answer = _get_awake(ref, wait)
        except GetTimeoutError:
            wait.look()
            require_node()
            if wait.left_s > 0.0:
                continue
            raise WaitTimeout(
                waiter=waiter,
                waited_for=waited_for,
                order=order,
                waited_s=wait.waited_s,
                advice="raise the timeout in the section cluster of the config if it is only slow, "
                "else look at its log in the Ray dashboard",
            ) from None
        except DEATHS as error:
            require_node(error)
            raise ActorDied(
                f"{waited_for} died while {waiter} waited for '{order}': {cause_of(error)}"
            ) from None
        except RayTaskError as error:
            raise own_error(error) from None
        wait.answered()
        return answer


def _get_awake(ref: Any, wait: OpenWait) -> Any:
    """Look for the answer for a second at most. Raises what `ray.get` raises."""
    began_s, limit_s = time.monotonic(), min(LOOK_S, wait.left_s)
    try:
        return ray.get(ref, timeout=limit_s)
    except GetTimeoutError:
        wait.overslept(time.monotonic() - began_s - limit_s)
        raise
    finally:
        late_s = time.monotonic() - began_s - limit_s
        _pauses.seconds += late_s if late_s > SLEPT_S else 0.0


class _Pauses:
    seconds = 0.0


_pauses = _Pauses()


def awake_s() -> float:
    """Seconds of a monotonic clock that leaves out what this process slept through while it waited."""
    return time.monotonic() - _pauses.seconds


def require_node(death: BaseException | None = None) -> None:
    """Raise NodeDied when Ray says that the node under this process is dead; `death`: what was heard of an actor."""
    if death is None or OWN_NODE_DIED not in str(death):
        try:
            own = ray.get_runtime_context().get_node_id()
            is_dead = any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes())
        except RayError:
            is_dead = False
        if not is_dead:
            return
    raise NodeDied(
        "the Ray node under this process died: its raylet was killed or crashed, and every actor on the machine ended "
        "with it; expected it to outlive the run; look at the machine's memory and at `dmesg`, then start again"
    )


def own_error(error: RayTaskError) -> BaseException:
    """Return what was raised on the other side: our own errors bare, others with their traceback."""
    return error.cause if isinstance(error.cause, RlhfSpecError) else error


def wait_any(refs: Sequence[Any], *, timeout_s: float) -> list[Any]:
    """Return the refs that are ready, waiting up to `timeout_s` for the first."""
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
    if not ready:
        return []
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return ready
