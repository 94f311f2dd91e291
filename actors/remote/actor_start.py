"""What every actor does first: its log file, its metrics' label, no proxy to itself.

The loop tells by the environment which run it is and where its folder is. A node that does not see the folder keeps
Ray's own logs only.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import ray

from . import run_metrics
from .loopback import spare_loopback
from .process_log import begin_process_log
from .process_metrics import begin_process_metrics

RUN_VARIABLE = "RLHFSPEC_RUN"
"Name of the run."
LOGS_VARIABLE = "RLHFSPEC_LOGS"
"Its folder of logs; empty: none are kept."


def actor_environment(run: str, logs: Path | None) -> dict[str, str]:
    """Variables that tell an actor its run."""
    return {RUN_VARIABLE: run, LOGS_VARIABLE: str(logs or "")}


def begin_actor(name: str) -> str:
    """Begin log and metrics of this process; the actor's name, which a replacement has of its own."""
    spare_loopback()
    name = _own_name() or name
    run, logs = os.environ.get(RUN_VARIABLE), os.environ.get(LOGS_VARIABLE)
    if run:
        run_metrics.begin(run_metrics.RaySink(run))
        begin_process_metrics(name)
    if run and logs:
        begin_process_log(Path(logs), name, run=run)
    return name


def set_heap_aside() -> None:
    """Keep what is there, for good, out of later collections: one over torch and models holds all threads up.

    Of a fork that is little: what it was forked with has been set aside there, and to look at it copies its pages.
    """
    gc.collect()
    gc.freeze()


def _own_name() -> str | None:
    try:
        return ray.get_runtime_context().get_actor_name()
    except Exception:
        return None  # outside of Ray, in tests
