"""Runs a function in several processes that form one process group, as trainer actors do."""

import queue
import traceback
from collections.abc import Callable
from typing import Any

import torch
from forked_script import forks

from rlhfspec.learning.training.parallel import DataParallel, join_group, new_store, store_at
from rlhfspec.learning.training.sharded import Sharded

HOST = "127.0.0.1"
LONG_S = 300.0
_CPU = torch.device("cpu")


def run_group(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = LONG_S) -> list[Any]:
    """What `function(rank, *args)` returns in each of `size` processes, by rank; exceptions are returned."""
    context = forks()
    store = new_store(HOST, size, timeout_s)
    results = context.Queue()
    processes = [
        context.Process(
            target=_member, args=(results, rank, size, store.port, timeout_s, function, args), daemon=True
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        found: dict[int, Any] = {}
        while len(found) < size:
            rank, result = _next(results, processes, found)
            found[rank] = result
        return [found[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def trainers_of(strategy: str) -> DataParallel:
    """The group as a learner takes it."""
    return Sharded(_CPU) if strategy == "fsdp2" else DataParallel()


def _next(results: Any, processes: list[Any], found: dict[int, Any]) -> tuple[int, Any]:
    for _ in range(int(LONG_S)):
        try:
            return results.get(timeout=1.0)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if rank not in found and process.exitcode:
                    return rank, ChildProcessError(f"rank {rank} ended with {process.exitcode}")
    raise TimeoutError(f"of {len(processes)} ranks only {sorted(found)} answered")


def _member(
    results: Any, rank: int, size: int, port: int, timeout_s: float, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        join_group(
            store_at(HOST, port, size, timeout_s), rank=rank, size=size, device=_CPU, timeout_s=timeout_s
        )
        results.put((rank, function(rank, *args)))
    except BaseException as error:
        traceback.print_exc()
        results.put((rank, error))
    results.close()
    results.join_thread()
