"""What the ranks of a group call together: gather and broadcast, by Gloo on CPUs and by NCCL on GPUs.

Each group has process groups of its own, outside torch.distributed's global state. Tensors travel as bytes, so that
one rank's are the others' bit by bit; whatever is added up is added by `engine.group.ranks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed
from torch import Tensor

_POLL_S = 0.02
"Between two looks for a rank that has not come."
_WATCH_S = 1.0
_EVER_S = 10.0 * 365 * 86400
"For what may come at any time: the leader's next order."
_dist: Any = torch.distributed


@runtime_checkable
class Collectives(Protocol):
    """Calls that all ranks of a group make in the same order; RuntimeError where one of them is gone."""

    device: torch.device
    "where tensors lie"

    def gather(self, mine: Tensor) -> Tensor:
        """Return what all ranks have of the same shape, [ranks, ...]."""
        ...

    def broadcast(self, tensor: Tensor, *, at_any_time: bool = False) -> None:
        """Let the leader's values be those of all, in place; a contiguous tensor.

        `at_any_time`: it is waited for without a limit.
        """
        ...


class ProcessGroupCollectives:
    """By a process group of torch's."""

    def __init__(
        self,
        group: Any,
        *,
        num_ranks: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout_s`: of one call, and `watch` is called meanwhile; on a GPU the host waits for none."""
        self._group, self._num_ranks, self.device = group, num_ranks, device
        self._timeout, self._watch = timedelta(seconds=timeout_s), watch

    def gather(self, mine: Tensor) -> Tensor:
        """See `Collectives`."""
        sent = bytes_of(mine.contiguous())
        everyone = sent.new_empty(self._num_ranks * sent.numel())
        self._finish(self._group._allgather_base(everyone, sent), self._timeout)
        return everyone.view(mine.dtype).view(self._num_ranks, *mine.shape)

    def broadcast(self, tensor: Tensor, *, at_any_time: bool = False) -> None:
        """See `Collectives`."""
        timeout = timedelta(seconds=_EVER_S) if at_any_time else self._timeout
        options = _dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
        self._finish(self._group.broadcast([bytes_of(tensor)], options), timeout)

    def _finish(self, work: Any, timeout: timedelta) -> None:
        if self.device.type == "cuda":
            # its stream is ordered behind it, and may be recorded
            work.wait()
            return
        ends_s = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                work.wait(timedelta(seconds=_WATCH_S))
                return
            except RuntimeError as error:
                # Gloo tells some ranks of a group, not all of them, that another is gone
                if work.is_completed() or time.monotonic() > ends_s:
                    late = f"no answer within {timeout.total_seconds():g} s"
                    raise RuntimeError(str(error) if work.is_completed() else late) from error
                self._watch()


def bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor's bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def meet(
    folder: Path,
    rank: int,
    num_ranks: int,
    device: torch.device,
    *,
    start_timeout_s: float,
    step_timeout_s: float,
    watch: Callable[[], None],
) -> tuple[Collectives, Collectives]:
    """Meet the other ranks in a folder of this machine; return what serves hosts, and what serves this device.

    `watch` is called about every second of waiting, now and later. Raises TimeoutError: not all came in time; what it
    raises.
    """
    store = _dist.FileStore(str(folder / "ranks"), num_ranks)
    _await_all(store, rank, num_ranks, timeout_s=start_timeout_s, watch=watch)
    try:
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 1
        options._timeout = timedelta(seconds=start_timeout_s)
        group = _dist.ProcessGroupGloo(_dist.PrefixStore("host", store), rank, num_ranks, options)
        made: dict[str, Any] = {"num_ranks": num_ranks, "timeout_s": step_timeout_s, "watch": watch}
        hosts = ProcessGroupCollectives(group, device=torch.device("cpu"), **made)
        if device.type == "cpu":
            return hosts, hosts
        return hosts, ProcessGroupCollectives(
            _nccl(_dist.PrefixStore("device", store), rank, num_ranks, device, start_timeout_s),
            device=device,
            **made,
        )
    except RuntimeError as error:
        raise TimeoutError(f"a rank of {num_ranks} could not be reached: {error}") from error


def _nccl(store: Any, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> Any:
    """A communicator of GPUs; its first call makes it. Whoever loses a rank ends its process: nothing else ends it."""
    options = _dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device):
        return _dist.ProcessGroupNCCL(store, rank, num_ranks, options)


def _await_all(store: Any, rank: int, num_ranks: int, *, timeout_s: float, watch: Callable[[], None]) -> None:
    """Say that this rank is here, and wait until all have said so."""
    ends_s = time.monotonic() + timeout_s
    store.set(f"here_{rank}", "yes")
    next_watch_s = 0.0
    while missing := ", ".join(str(one) for one in range(num_ranks) if not store.check([f"here_{one}"])):
        if time.monotonic() > next_watch_s:
            watch()
            next_watch_s = time.monotonic() + _WATCH_S
        if time.monotonic() > ends_s:
            raise TimeoutError(f"rank {missing} of {num_ranks} did not come within {timeout_s:g} s")
        time.sleep(_POLL_S)
