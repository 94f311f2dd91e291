"""Starts Ray's own processes with patience, as a busy machine needs it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray._private import parameter, ray_constants, services
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from ..folder.leftovers import end_processes
from . import forked_workers
from .private_folder import environment

SLOW_START = "timed out during startup"
"What Ray says when its own processes did not come up in time."
START_S = 180
"What each of Ray's processes may take to come up: where several share few cores, its own half a minute is too short."
PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": str(START_S),
    "RAY_raylet_start_wait_time_s": str(START_S),
    "RAY_worker_register_timeout_seconds": str(START_S),
    "RAY_agent_register_timeout_ms": str(1000 * START_S),
}
"Of the environment, for Ray's processes and for `ray.init`."
_AGENT_PORTS = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"As `RayParams` calls them."
_SETTINGS = {
    # processes without use here: nothing is scaled, and no log is sent to the driver
    "no_monitor": True,
    "include_log_monitor": False,
    "setup_worker_path": forked_workers.__file__,
}
_LOOK_S = 0.1
_DASHBOARD_NICE = 10


class StartFailed(Exception):
    """One of Ray's own processes has ended while it was waited for."""


def start_twice(*, folder: Path, **settings: Any) -> Any:
    """Call `ray.init` in a temporary folder of its own; once more where Ray did not come up in time.

    Ports of the agents are given: a raylet waits for what they take, and ends itself where it is not told within 15 s.
    Nothing of the first try is running at the second. Raises as `ray.init` does, StartFailed.
    """
    for is_last in (False, True):
        *agents, export = free_ports(len(_AGENT_PORTS) + 1)
        try:
            given = _SETTINGS | dict(zip(_AGENT_PORTS, agents, strict=True))
            with environment(forked_workers.raylet_environment()), _given(given):
                return ray.init(_temp_dir=str(folder), _metrics_export_port=export, **settings)
        except Exception as error:
            if is_last or not (isinstance(error, StartFailed) or SLOW_START in str(error)):
                raise
        ray.shutdown()
        end_processes(folder)


def free_ports(count: int) -> list[int]:
    """Different TCP ports that are free now on all interfaces."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def _given(settings: Mapping[str, Any]) -> Iterator[None]:
    """Let `ray.init` start its processes with settings that it takes no arguments for, and wait for them."""
    if not ray.__version__.startswith(forked_workers.KNOWN_RAY):
        yield
        return
    started = dict[str, Any]()
    names = {
        one.__name__[1:]: one for one in (_start_ray_process, _start_raylet, _start_api_server, _get_node)
    }
    changed: Any = {name: partial(one, getattr(services, name), started) for name, one in names.items()}
    params = partial(parameter.RayParams, **settings)
    with patch.multiple(services, **changed), patch.object(parameter, "RayParams", params):
        yield


def _start_ray_process(start: Any, started: dict[str, Any], command: Any, kind: str, **named: Any) -> Any:
    """Remember it; actors come up beside the dashboard, and go first."""
    one = start(command, kind, **named)
    started[kind] = one.process
    if kind == ray_constants.PROCESS_TYPE_DASHBOARD:
        os.setpriority(os.PRIO_PROCESS, one.process.pid, _DASHBOARD_NICE)
    return one


def _start_raylet(start: Any, _: Any, *args: Any, **named: Any) -> Any:
    """Say first where the dashboard's agent will listen: a raylet waits for that file although the port is given."""
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    given = signature(start).bind(*args, **named).arguments
    port = given["dashboard_agent_listen_port"]
    persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
    return start(*args, **named)


def _start_api_server(start: Any, _: Any, *args: Any, **named: Any) -> Any:
    """Say first where the dashboard will listen, which is given: nobody waits for it. None where none is wanted."""
    given = signature(start).bind(*args, **named).arguments
    head = GcsClient(address=given["gcs_address"], cluster_id=given["cluster_id_hex"])
    at, of = ray_constants.DASHBOARD_ADDRESS.encode(), ray_constants.KV_NAMESPACE_DASHBOARD
    # where there is none, its agent would log an error a second until it had an address; nobody listens at port 1
    head.internal_kv_put(at, f"{given['host']}:{given.get('port') or 1}".encode(), True, of)
    # the sockets of its `multiprocessing` fit there, and go with it
    with environment({"TMPDIR": given["temp_dir"]}):
        return start(*args, **named) if given["include_dashboard"] else ("", None)


def _get_node(ask: Any, started: dict[str, Any], gcs_address: str, node_id: str) -> Any:
    """Ask until it is there; Ray takes a RuntimeError for 'not yet' and gives up after 30 s."""
    ends_s = time.monotonic() + START_S
    while True:
        try:
            return ask(gcs_address, node_id)
        except RuntimeError:
            ended = [kind for kind, one in started.items() if one.poll() is not None]
            if ended:
                raise StartFailed(f"{' and '.join(sorted(ended))} ended while it was coming up") from None
            if time.monotonic() > ends_s:
                raise
        time.sleep(_LOOK_S)
