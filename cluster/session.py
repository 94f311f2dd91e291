"""Starts and ends Ray for one run: a private local cluster, or a place in a running one.

A local cluster gets everything said explicitly: no authentication token (a fresh `ray.init` would write
one into the home folder), a temporary folder of its own, an object store that fits /dev/shm, a free
dashboard port, a namespace with the run id. Only what was started here is ended here; leaving the
`with` block by Ctrl-C ends it within seconds. What killed runs left is swept when the next one starts.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from cluster import machine
from cluster.memory import OBJECT_STORE_LIMIT_BYTES
from cluster.origin import ROOT
from cluster.sweep import RAY_FOLDER, claim, sweep_ray_folders
from core.config import Config
from core.errors import PlacementError

MIN_OBJECT_STORE_BYTES = 100 << 20
JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"Set by Ray in the entry point of a submitted job."
TERMINATED = 128 + signal.SIGTERM
"Exit code after SIGTERM, as a shell would report it."
_ONE_SIGTERM_S = 10.0
"Shells and `timeout` send it on: another one that soon is the same, and does not cut the clean-up short."


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """What was started or joined."""

    namespace: str
    is_local: bool
    "started here, hence ended here"
    dashboard_url: str | None
    swept: tuple[str, ...] = ()
    "what dead runs had left and what was done with it, a line each"


@contextmanager
def ray_session(
    config: Config, run_id: str, *, on_sigterm: Callable[[], None] = lambda: None
) -> Iterator[RaySession]:
    """Start or join Ray, and leave it however the block ends. SIGTERM ends the block like Ctrl-C.

    `on_sigterm` is called first of all then: whoever sent it may not wait for the rest.
    A Ray that this process has already initialised is used and left alone.
    Raises PlacementError when the cluster at `cluster.address` cannot be reached.
    """
    namespace = f"rlhfspec-{run_id}-{secrets.token_hex(2)}"
    if ray.is_initialized():
        yield RaySession(namespace=namespace, is_local=False, dashboard_url=None)
        return
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    is_up = False
    try:
        with _environment(_worker_environment()):
            if address:
                with _joined(address, namespace, on_sigterm) as session:
                    is_up = True
                    yield session
            else:
                with _local(config, namespace, on_sigterm) as session:
                    is_up = True
                    yield session
    except SystemExit as error:
        if is_up or error.code == TERMINATED:
            raise
        # Ray's own handler, in force until `ray.init` returns
        on_sigterm()
        raise SystemExit(TERMINATED) from error


@contextmanager
def _local(config: Config, namespace: str, on_sigterm: Callable[[], None]) -> Iterator[RaySession]:
    swept = sweep_ray_folders(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=RAY_FOLDER)
    cluster = config.cluster
    try:
        claim(Path(folder))
        with _environment({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}):
            context = ray.init(
                address="local",
                namespace=namespace,
                num_cpus=machine.num_cores(),
                include_dashboard=cluster.dashboard,
                dashboard_host="127.0.0.1",
                dashboard_port=(cluster.dashboard_port or free_port()) if cluster.dashboard else None,
                object_store_memory=cluster.object_store_bytes or object_store_bytes(),
                _temp_dir=folder,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
            with sigterm_exits(on_sigterm):
                yield RaySession(
                    namespace=namespace,
                    is_local=True,
                    dashboard_url=_dashboard_url(context),
                    swept=tuple(swept),
                )
    finally:
        with _uninterrupted():
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _joined(address: str, namespace: str, on_sigterm: Callable[[], None]) -> Iterator[RaySession]:
    in_job = JOB_MARK in os.environ
    # A job's working directory has been uploaded by `ray job submit`; otherwise this tree is.
    runtime_env = None if in_job else {"working_dir": str(ROOT), "excludes": ["/runs", "/.venv", "/.git"]}
    try:
        context = ray.init(
            address=address,
            namespace=namespace,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        raise PlacementError(
            f"cannot join the Ray cluster at '{address}': {error}; start it with `ray start --head`, or "
            "leave cluster.address and RAY_ADDRESS unset for a local one"
        ) from error
    try:
        with sigterm_exits(on_sigterm):
            yield RaySession(namespace=namespace, is_local=False, dashboard_url=_dashboard_url(context))
    finally:
        with _uninterrupted():
            ray.shutdown()


def object_store_bytes() -> int:
    """A quarter of what is free in /dev/shm, at most 1 GiB, at least what Ray accepts."""
    shared = machine.shared_memory_bytes() or 0
    return max(MIN_OBJECT_STORE_BYTES, min(OBJECT_STORE_LIMIT_BYTES, shared // 4))


def free_port() -> int:
    """A TCP port that is free now on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _worker_environment() -> dict[str, str]:
    """Workers import this tree, and the caller's folder for reward functions of their own."""
    inherited = os.environ.get("PYTHONPATH", "")
    folders = dict.fromkeys([str(ROOT), str(Path.cwd()), *filter(None, inherited.split(os.pathsep))])
    return {"PYTHONPATH": os.pathsep.join(folders)}


def _dashboard_url(context: Any) -> str | None:
    url = context.dashboard_url
    return f"http://{url}" if url else None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def sigterm_exits(first: Callable[[], None]) -> Iterator[None]:
    """Turn SIGTERM into `first()` and then SystemExit, so that `finally` blocks run; main thread only.

    `ray.init` puts handlers of its own in the place, so this is entered again after it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    came_s: float | None = None

    def end(*_: object) -> None:
        nonlocal came_s
        now_s = time.monotonic()
        if came_s is not None and now_s - came_s < _ONE_SIGTERM_S:
            return
        came_s = now_s
        with suppress(Exception):
            first()
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit as error:
        if came_s is not None and error.code != TERMINATED:
            # a wait within Ray swallows the code and exits with 1
            raise SystemExit(TERMINATED) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C or SIGTERM not cut the clean-up short; it takes about two seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
