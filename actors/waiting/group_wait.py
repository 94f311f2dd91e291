"""Waiting for actors that work together: one that fails leaves the others waiting for it, so the first failure counts.

When one trainer of several dies, the others end with an error about a broken connection, later or at their limit. Who
asks must hear of the one that died, soon, and by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhfspec.actors.waiting.node import require_node
from rlhfspec.actors.waiting.waiting import get, no_answer, wait_any
from rlhfspec.actors.waiting.watch import LOOK_S, OpenWait
from rlhfspec.core.errors import InstanceLost, PeerLost, RlhfSpecError

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
