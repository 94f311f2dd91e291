"""Starts and ends Ray for one run: a private local cluster, or a place in a running one.

A local cluster gets everything said explicitly: a token of its own (a fresh `ray.init` would write one into
the home folder), a temporary folder of its own, an object store that fits /dev/shm, a free
dashboard port, a namespace with the run id. Only what was started here is ended here; leaving the
`with` block by Ctrl-C ends it within seconds. What killed runs left is swept when the next one starts.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, worker

from ...actors.remote.actor_start import actor_environment
from ...actors.remote.watch import Say, waits_noted
from ...core.errors import NodeDied, PlacementError, one_line
from ...core.settings.cluster import ClusterConfig
from ..folder.leftovers import RAY_FOLDER, claim, removed_when_gone, sweep_ray_folders, uninterrupted
from . import machine, private_folder
from .forked_workers import KNOWN_RAY, forking, joined_address, worker_environment
from .origin import IS_CHECKOUT, ROOT
from .private_folder import environment, using_token
from .ray_init import PATIENCE, START_S, free_ports, start_twice

logger = logging.getLogger(__name__)
MIN_OBJECT_STORE_BYTES = 100 << 20
OBJECT_STORE_USUAL_BYTES = 1 << 30
PROCESS_ADDRESS_BYTES = 4 << 30
"That a process maps beside the store: 3.8 GiB were measured (demo pair, torch 2.13 for CPUs, Ray 2.60)."
LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 10.0
"For a TCP connection to a running cluster: Ray itself tries for many minutes."
_LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # metrics ask for no token, and nothing need listen outside the machine: by default GCS, raylet and every worker do.
    # Ray's switch for laptops, which it reads while it is imported (`_on_loopback`)
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # on a busy machine importing takes Serve's proxy longer than its five seconds: it would be killed, again and again
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # its store is made for what a run publishes: from four fifths on it would write them to the disk
    "RAY_object_spilling_threshold": "1.0",
    **PATIENCE,
}
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
    token_file: Path | None = None
    "of what was started here: its dashboard asks for what stands in it"
    environment: Mapping[str, str] = field(default_factory=dict)
    "variables that tell actors their run"


def check_local_ray(cluster: ClusterConfig) -> None:
    """Require what a private Ray needs here: a port, shared memory, addresses, a short temporary folder.

    Raises PlacementError for the first that is missing; nothing is started.
    """
    _check_object_store(cluster.object_store_bytes)
    _check_address_space(cluster.object_store_bytes or object_store_bytes())
    private_folder.temporary_base()
    if cluster.dashboard and cluster.dashboard_port is not None:
        _check_port(cluster.dashboard_port)


def _check_object_store(wanted: int | None) -> None:
    if wanted is None:
        return
    have = machine.shared_memory_bytes()
    if wanted < MIN_OBJECT_STORE_BYTES or (have is not None and wanted > have):
        room = f"at most {have} (free in /dev/shm)" if have is not None else "what fits into memory"
        raise PlacementError(
            f"cluster.object_store_bytes {wanted} cannot be had: expected at least {MIN_OBJECT_STORE_BYTES} and "
            f"{room}; set cluster.object_store_bytes between the two, or leave it out"
        )


def _check_address_space(store_bytes: int) -> None:
    """Ray's core ends a process that cannot map the store with a trace of its own."""
    limit, needed = resource.getrlimit(resource.RLIMIT_AS)[0], PROCESS_ADDRESS_BYTES + store_bytes
    if resource.RLIM_INFINITY != limit < needed:
        raise PlacementError(
            f"the addresses of a process are limited to {limit / 2**30:.1f} GiB (ulimit -v): expected at least "
            f"{needed / 2**30:.1f}, of which the object store is {store_bytes / 2**30:.1f}; run `ulimit -v unlimited`"
        )


def _check_port(port: int) -> None:
    if not 0 < port < 1 << 16:
        raise PlacementError(
            f"cluster.dashboard_port must be 1 to 65535, got {port}; leave it out to take a free one"
        )
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        raise PlacementError(
            f"cluster.dashboard_port {port} cannot be taken on {LOOPBACK}: {error.strerror}; name another, or "
            "leave it out to take a free one"
        ) from error


@contextmanager
def ray_session(
    cluster: ClusterConfig,
    run_id: str,
    *,
    on_sigterm: Callable[[], None] = lambda: None,
    store_bytes: int | None = None,
    logs: Path | None = None,
    note: Say = logger.warning,
) -> Iterator[RaySession]:
    """Start or join Ray, and leave it however the block ends. SIGTERM ends the block like Ctrl-C.

    `on_sigterm` is called first of all then: whoever sent it may not wait for the rest. `store_bytes` is the size of
    a local cluster's object store where `cluster` names none. `logs` is the folder where actors write theirs. `note` is
    told where Ray's files lie if not where they should, what dead runs had left, and what the run goes on without.
    A Ray that this process has already initialised is used and left alone.
    Raises PlacementError when Ray cannot be started here, or the cluster at `cluster.address` cannot be reached.
    """
    namespace = f"rlhfspec-{run_id}-{secrets.token_hex(2)}"
    variables = actor_environment(run_id, logs)
    if ray.is_initialized():
        yield RaySession(namespace=namespace, is_local=False, dashboard_url=None, environment=variables)
        return
    address = joined_address(cluster.address)
    is_up = False
    own = _local(cluster, namespace, on_sigterm, store_bytes, note)
    started = _joined(address, namespace, on_sigterm) if address else own
    try:
        with environment(worker_environment()), started as session:
            is_up = True
            yield replace(session, environment=variables)
    except SystemExit as error:
        if is_up or error.code == TERMINATED:
            raise
        # Ray's own handler, in force until `ray.init` returns
        on_sigterm()
        raise SystemExit(TERMINATED) from error


@contextmanager
def _local(
    cluster: ClusterConfig, namespace: str, on_sigterm: Callable[[], None], store_bytes: int | None, note: Say
) -> Iterator[RaySession]:
    check_local_ray(cluster)
    base = private_folder.temporary_base()
    for line in (*private_folder.temporary_notes(), *sweep_ray_folders(base)):
        note(line)
    if not ray.__version__.startswith(KNOWN_RAY):
        note(f"Ray {ray.__version__} starts more slowly than {KNOWN_RAY}x, whose start is known here")
    folder = Path(tempfile.mkdtemp(prefix=RAY_FOLDER, dir=base))
    with removed_when_gone(folder):
        claim(folder)
        token_file = private_folder.make_token(folder)
        with using_token(token_file), environment(_LOCAL_ENVIRONMENT), _on_loopback(), _shut_down_after():
            with waits_noted(lambda: f"Ray's own processes, each for {START_S} s at most"):
                context = _start(cluster, folder, namespace, store_bytes)
            private_folder.note_address(folder, context.address_info["gcs_address"])
            # most commands have begun it long before
            with forking(note), sigterm_exits(on_sigterm):
                yield RaySession(
                    namespace=namespace,
                    is_local=True,
                    dashboard_url=context.dashboard_url and f"http://{context.dashboard_url}",
                    token_file=token_file,
                )


def _start(cluster: ClusterConfig, folder: Path, namespace: str, store_bytes: int | None) -> Any:
    # Ray lets everybody write into its own
    own = folder / private_folder.BELOW
    own.mkdir()
    try:
        return start_twice(
            address="local",
            namespace=namespace,
            num_cpus=machine.num_cores(),
            include_dashboard=cluster.dashboard,
            dashboard_host=LOOPBACK,
            dashboard_port=(cluster.dashboard_port or free_ports(1)[0]) if cluster.dashboard else None,
            object_store_memory=cluster.object_store_bytes or store_bytes or object_store_bytes(),
            folder=own,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # of many kinds: sockets, processes, memory
        # bad settings have been refused above: it is the machine
        raise NodeDied(
            f"cannot start Ray on this machine: {one_line(str(error))}; start again, as another process may have taken "
            f"a port; if that fails too, free memory, /dev/shm and {folder.parent}, wait until the load falls ("
            f"{os.getloadavg()[0]:.0f} on {machine.num_cores()} cores), set cluster.dashboard to false, or join a "
            "running cluster with cluster.address"
        ) from error


@contextmanager
def _shut_down_after() -> Iterator[None]:
    try:
        yield
    finally:
        with uninterrupted():
            ray.shutdown()


@contextmanager
def _joined(address: str, namespace: str, on_sigterm: Callable[[], None]) -> Iterator[RaySession]:
    require_reachable(address)
    # A job's working directory has been uploaded by `ray job submit`; otherwise this tree is.
    tree = {"working_dir": str(ROOT), "excludes": ["/runs", "/.venv", "/.git", "/build"]}
    runtime_env = None if JOB_MARK in os.environ else tree if IS_CHECKOUT else {"py_modules": [str(ROOT)]}
    token_file = private_folder.token_of(address)
    with nullcontext() if token_file is None else using_token(token_file), _shut_down_after():
        try:
            with _on_loopback() if _is_private(address) else nullcontext():
                context = ray.init(
                    address=address,
                    namespace=namespace,
                    runtime_env=runtime_env,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
        except Exception as error:  # a refusal, a time-out, another version: of many kinds
            raise PlacementError(
                f"cannot join the Ray cluster at '{address}': {one_line(str(error))}; start it with `ray start --head` "
                "or leave cluster.address and RAY_ADDRESS unset for a local one; if it asks for a token, set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on its head (a run's own local Ray "
                "lets only its user in)"
            ) from error
        with sigterm_exits(on_sigterm):
            yield RaySession(
                namespace=namespace,
                is_local=False,
                dashboard_url=context.dashboard_url and f"http://{context.dashboard_url}",
            )


def joined_cluster(address: str) -> AbstractContextManager[RaySession]:
    """Join a running cluster to look at it, and leave it with the block. Raises PlacementError."""
    return _joined(address, "rlhfspec-observer", lambda: None)


def require_reachable(address: str) -> None:
    """Require that something listens at `host:port` or `ray://host:port`; other addresses are left to Ray."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise PlacementError(
            f"cannot reach the Ray cluster at '{address}': {one_line(str(error))} (waited at most "
            f"{CONNECT_TIMEOUT_S:.0f} s); start it with `ray start --head`, fix cluster.address or RAY_ADDRESS, or "
            "leave both unset for a local one"
        ) from error


def _is_private(address: str) -> bool:
    """Whether that is a cluster on the loopback alone, as a run's own: Ray would look for it elsewhere, and wait."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or host.strip("[]") not in private_folder.LOOPBACK_NAMES:
        return False
    elsewhere = ray.util.get_node_ip_address(), int(port)
    try:
        socket.create_connection(elsewhere, timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return True
    return False


def object_store_bytes(needed: int = 0) -> int:
    """What a run needs, but at most nine tenths of what is free in /dev/shm; beyond, Ray spills to disk.

    At least a quarter of /dev/shm up to 1 GiB, and at least what Ray accepts.
    """
    shared = machine.shared_memory_bytes() or 0
    usual = min(OBJECT_STORE_USUAL_BYTES, shared // 4)
    return max(MIN_OBJECT_STORE_BYTES, usual, min(needed, shared * 9 // 10))


def note_dashboard(note: Say) -> None:
    """Tell where the dashboard of this process's Ray, which nobody waits for, has ended."""
    node = worker._global_node
    started = {} if node is None else node.all_processes
    for one in started.get(ray_constants.PROCESS_TYPE_DASHBOARD, []):
        if node is not None and (code := one.process.poll()) is not None:
            logs = node.get_logs_dir_path()
            note(f"Ray's dashboard ended with exit code {code}, and the run goes on without it: see {logs}")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray, imported already, take the loopback address for its node's; its processes are told by environment."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


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
