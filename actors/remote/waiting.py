"""Waiting for other processes: every wait has an end, and every failure arrives as our own error.

`RayTaskError` is unwrapped to the error that was raised on the other side; a dead actor becomes
`ActorDied`, a silent one `WaitTimeout`, both naming who waited for whom and for what. Long waits are told on the
way (`actors.remote.watch`), and a dead Ray node is not mistaken for a dead actor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from ...core.errors import InstanceLost, PeerLost, RlhfSpecError, WaitTimeout
from .deaths import DEATHS, cause_of
from .node import require_node, require_raylet
from .watch import LOOK_S, SLEPT_S, OpenWait


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
        advice="if it is only slow raise cluster.start_timeout_s (starting, joining, first weights) or "
        "cluster.order_timeout_s (what is asked later), else look at its log in the Ray dashboard",
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


GRACE_S = 5.0
"After a failure, for the others to say theirs: Ray may tell of a death later than the connection breaks."
_LATE = 0.8
"Share of the limit after which a failure is taken for the end of waiting for somebody else."
_NOW_S = 60.0
"For an answer that is there already, in however many pieces."


def get_all(
    refs: Mapping[str, Any],
    *,
    waiter: str,
    order: str,
    timeout_s: float,
    meanwhile: Callable[[], None] | None = None,
    gets_on: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Wait for the answers of a group, by name; of several failures the one that explains the others is raised.

    `meanwhile` and `gets_on` are called about every second until all have answered; what they raise ends the wait.
    Where the latter is true, the time limit begins anew.

    Raises:
        WaitTimeout: not all answered within `timeout_s` after one got on; the message names who did not.
        InstanceLost: one died, or fell silent while the others waited for it.
        RlhfSpecError: whatever one of them raised, as itself; `RayTaskError` for errors of other kinds.
    """
    if len(refs) == 1 and meanwhile is None and gets_on is None:
        ((name, ref),) = refs.items()
        return {name: get(ref, waiter=waiter, waited_for=name, order=order, timeout_s=timeout_s)}
    wait = OpenWait(waiter=waiter, waited_for=", ".join(refs), order=order, timeout_s=timeout_s)
    answers: dict[str, Any] = {}
    failed: dict[str, BaseException] = {}
    failed_at_s = 0.0
    left = dict(refs)
    while left:
        ready = wait_any(list(left.values()), timeout_s=LOOK_S)
        for name in [name for name, ref in left.items() if ref in ready]:
            ref = left.pop(name)
            try:
                answers[name] = get(ref, waiter=waiter, waited_for=name, order=order, timeout_s=_NOW_S)
            except Exception as error:
                failed_at_s = failed_at_s if failed else time.monotonic()
                failed[name] = error
        if failed and time.monotonic() - failed_at_s > GRACE_S:
            break
        if not ready:
            wait.look()
            require_node()
            if meanwhile is not None:
                meanwhile()
            # one that failed may take the others with it, and explains them
            if gets_on is not None and not failed and gets_on():
                wait.heard()
        if not failed and wait.left_s <= 0.0:
            raise no_answer(waiter, ", ".join(left), order, wait.waited_s)
    if failed:
        # NCCL ends a process whose peer is silent, at the limit: what died late is not what failed
        gave_up = wait.left_s < (1.0 - _LATE) * timeout_s
        raise explaining(failed, list(left), order, gave_up=gave_up) from None
    wait.answered()
    return answers


def explaining(
    failed: Mapping[str, BaseException], silent: list[str], order: str, *, gave_up: bool
) -> BaseException:
    """The failure that explains the others: a death, then what one raised itself, then whom all waited for.

    Args:
        failed: what came of those that failed, by name.
        silent: names of those that neither answered nor failed.
        order: what they were asked for.
        gave_up: the failures came when waiting for each other had to end.
    """
    if silent and gave_up:
        failed = {name: PeerLost(str(error)) for name, error in failed.items()}
    dead = [error for error in failed.values() if isinstance(error, InstanceLost)]
    own = [
        error
        for error in failed.values()
        if isinstance(error, RlhfSpecError) and not isinstance(error, PeerLost)
    ]
    other = [error for error in failed.values() if not isinstance(error, RlhfSpecError)]
    first = next(iter((*dead, *own, *other)), None)
    if first is not None:
        return first
    name, lost = next(iter(failed.items()))
    if silent:
        return InstanceLost(
            f"{', '.join(silent)} neither answered '{order}' nor died, and the other trainers gave up waiting for it: "
            f"{name} says: {lost}"
        )
    return lost
