"""Starts Ray's own processes with patience, as a busy machine needs it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import ray
from ray._private import parameter, ray_constants, services
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

from ...core.proc_files import PARENT, PROC, STATE, stat_fields
from ..folder.leftovers import end_processes

SLOW_START = ("timed out during startup", "error message from the dashboard")
"What Ray says when its own processes, or its dashboard, did not come up in time."
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
_LEFT_OUT = {"no_monitor": True, "include_log_monitor": False}
"Processes without use here: nothing is scaled, and no log is sent to the driver. Python, as most that starts beside."
_ITS_OWN = ("raylet", "gcs_server")
"Names of those without which a start cannot succeed."
_LOOK_S = 0.2


class StartFailed(Exception):
    """One of Ray's own processes has ended while it was waited for."""


def start_twice(*, folder: Path, **settings: Any) -> Any:
    """Call `ray.init` in a temporary folder of its own; once more where Ray did not come up in time.

    Ports of the agents are given: a raylet waits for what they take, and ends itself where it is not told within 15 s.
    Nothing of the first try is running at the second. Raises as `ray.init` does, StartFailed.
    """
    for is_last in (False, True):
        *agents, export = _free_ports(len(_AGENT_PORTS) + 1)
        try:
            with _patience(), _given(_LEFT_OUT | dict(zip(_AGENT_PORTS, agents, strict=True))):
                return ray.init(_temp_dir=str(folder), _metrics_export_port=export, **settings)
        except Exception as error:
            is_slow = isinstance(error, StartFailed) or any(words in str(error) for words in SLOW_START)
            if is_last or not is_slow:
                raise
        ray.shutdown()
        end_processes(folder)


def _free_ports(count: int) -> list[int]:
    """Different TCP ports that are free now on all interfaces."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def _given(settings: Mapping[str, int]) -> Iterator[None]:
    """Let `ray.init` start its processes with settings that it takes no arguments for."""
    whole, start = parameter.RayParams, services.start_raylet
    parameter.RayParams = partial(whole, **settings)  # type: ignore[misc]
    services.start_raylet = partial(_start_raylet, start)
    try:
        yield
    finally:
        parameter.RayParams, services.start_raylet = whole, start


def _start_raylet(start: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Say first where the dashboard's agent will listen: a raylet waits for that file although the port is given."""
    given = signature(start).bind(*args, **named).arguments
    port = given["dashboard_agent_listen_port"]
    persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
    return start(*args, **named)


@contextmanager
def _patience() -> Iterator[None]:
    """Let `ray.init` wait: how long it does for its raylet and dashboard cannot be told to it."""
    asked, dashboard_s = services.get_node, ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S
    services.get_node = _patiently(asked, set(_ended_children()))
    ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S = max(dashboard_s, START_S)
    try:
        yield
    finally:
        services.get_node, ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S = asked, dashboard_s


def _patiently(ask: Callable[[str, str], Any], ended_before: set[int]) -> Callable[[str, str], Any]:
    """What asks for a node until it is there; Ray takes a RuntimeError for 'not yet' and gives up after 30 s."""

    def ask_on(gcs_address: str, node_id: str) -> Any:
        ends_s = time.monotonic() + START_S
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:
                ended = [name for pid, name in _ended_children().items() if pid not in ended_before]
                if ended:
                    raise StartFailed(f"{' and '.join(sorted(ended))} ended while it was coming up") from None
                if time.monotonic() > ends_s:
                    raise
            time.sleep(_LOOK_S)

    return ask_on


def _ended_children() -> dict[int, str]:
    """This process's children of Ray's that have ended and that nobody has asked how, by number."""
    found = {}
    for entry in PROC.glob("[0-9]*"):
        fields = stat_fields(int(entry.name))
        if fields[STATE : STATE + 1] == ["Z"] and fields[PARENT] == str(os.getpid()):
            with suppress(OSError):
                name = (entry / "comm").read_text().strip()
                if name in _ITS_OWN:
                    found[int(entry.name)] = name
    return found
