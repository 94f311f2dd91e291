"""Tries families in processes of their own, forked from one that has the libraries loaded: a crash is a finding."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from benchmarks.families.configs import Family
from benchmarks.families.trial import Finding, try_family

LIMIT_S = 600.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # what is allocated and what is freed holds junk, not zeros
    "MALLOC_PERTURB_": "165",
}


def try_families(
    families: Iterable[Family],
    *,
    told: Callable[[Finding], None] | None = None,
    attempt: Callable[[Family], Finding] = try_family,
) -> list[Finding]:
    """Return what became of each, in their order; as many at once as there are cores.

    Args:
        families: to try.
        told: hears each finding as it is made.
        attempt: what tries one family, in its process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.families.trial"])
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    def one(family: Family) -> Finding:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(attempt, family, theirs))
        process.start()
        theirs.close()
        finding = None
        try:
            if ours.poll(LIMIT_S):
                finding = ours.recv()
            else:
                finding = Finding(
                    name=family.name, outcome="raw exception", reason=f"no answer within {LIMIT_S:.0f} s"
                )
        except EOFError:
            process.join()
            finding = Finding(name=family.name, outcome="corruption", reason=_end(process.exitcode))
        process.kill()
        process.join()
        if told is not None:
            told(finding)
        return finding

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(one, families))


def _work(attempt: Callable[[Family], Finding], family: Family, answer: Connection) -> None:
    answer.send(attempt(family))


def _end(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"the process ended by {signal.Signals(-exitcode).name}"
    return f"the process ended with exit code {exitcode} and no answer"
