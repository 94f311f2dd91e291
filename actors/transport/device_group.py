"""Process groups whose ends are looked at until a transfer is over, and what NCCL needs to be left alone by.

NCCL's own wait only orders streams, and its watchdog would end a process that holds the caches of others: here the host
looks, has a limit, and gives the group up itself. Communicators block, as torch's do by default (those that do not are
known to hang at random): what may never come back is called on a thread of its own, which is left behind then. The
actor's end gives back what NCCL holds on the device.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from ...core.errors import PlacementError

T = TypeVar("T")
logger = logging.getLogger(__name__)
_POLL_S = 0.0002
_ABORT_S = 5.0
_SAFE_SETTINGS = {
    # By default a watchdog thread ends the whole process when a transfer fails or takes too long. Timeouts and aborts
    # are ours.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_SETTINGS_LOCK = threading.Lock()


def open_nccl(store: Any, rank: int, size: int, *, device: torch.device, timeout_s: float) -> Any:
    """Make a private `ProcessGroupNCCL`; its communicator is made by the first transfer, through `store`.

    Raises PlacementError where torch has no NCCL or no such GPU, and what the store raises.
    """
    require_nccl(device)
    kind: Any = torch.distributed.ProcessGroupNCCL
    options = kind.Options(is_high_priority_stream=False)
    options.config.blocking = 1
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device), _safe_settings():
        return kind(store, rank, size, options)


def require_nccl(device: torch.device) -> None:
    """Raise PlacementError where torch has no NCCL or no such GPU."""
    if not torch.distributed.is_nccl_available() or (device.index or 0) >= torch.cuda.device_count():
        raise PlacementError(
            f"the transport nccl needs torch with NCCL and GPU {device.index or 0}, got "
            f"{torch.cuda.device_count()} GPUs; use the transport gloo or object_store"
        )


def within(call: Callable[[], T], timeout_s: float, device: torch.device) -> T:
    """What a call gives that waits for others inside NCCL: a group's first transfer makes its communicator.

    Raises RuntimeError when it does not come back in time, and what it raises.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            # a thread has a current device of its own
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="nccl").start()
    try:
        return answer.result(timeout_s)
    except FutureTimeout:
        if answer.done():
            raise
        raise RuntimeError("nothing in time") from None


def abort(group: Any, device: torch.device) -> None:
    """Give a group up whose peers may be gone; not `shutdown`, which waits for transfers under way."""
    try:
        within(group.abort, _ABORT_S, device)
    except RuntimeError as error:
        logger.warning(
            "a NCCL group could not be aborted (%s): its memory comes back with this actor's end", error
        )


def finish(work: Any, timeout_s: float) -> None:
    """Wait for a transfer and order this thread's stream behind it.

    Raises RuntimeError when it failed or is not over in time; the group is of no use then.
    """
    ends_s = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > ends_s:
            raise RuntimeError("nothing in time")
        time.sleep(_POLL_S)
    if (error := work.exception()) is not None:
        raise RuntimeError(str(error))
    work.wait()


@contextmanager
def _safe_settings() -> Iterator[None]:
    with _SETTINGS_LOCK:
        before = {name: os.environ.get(name) for name in _SAFE_SETTINGS}
        os.environ.update(_SAFE_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
