"""Runs an application of Ray Serve until it is told to stop: on a Ray of its own, or in a running cluster."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...core.errors import PlacementError, RlhfSpecError, one_line
from ...core.settings.cluster import ClusterConfig
from ..ray_start.ray_session import RaySession, ray_session
from ..serving.server_notes import ServerNotes

_LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server listens, and in which cluster."""

    name: str = "reward"
    "of the Serve application: `reward.app`"
    host: str = "127.0.0.1"
    port: int = 8000
    address: str | None = None
    "of a running cluster; None: RAY_ADDRESS if set, else a local Ray"

    def url(self, route: str) -> str:
        """What clients ask, for an application that Serve has at `route`."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}{route.rstrip('/')}"

    def require_free(self) -> None:
        """Raise PlacementError where the port is taken."""
        with socket.socket() as probe:
            # a port that was just given up is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except (OSError, OverflowError) as error:
                raise PlacementError(
                    f"port {self.port} of {self.host} cannot be taken: {error}; name another with --port"
                ) from None


def serve_application(
    build: Callable[[RaySession], Any],
    place: ServerAddress,
    *,
    cluster: ClusterConfig,
    ready: Callable[[str], str],
    advice: str,
    note: Callable[[str], None],
    store_bytes: int | None = None,
    before_end: Callable[[Any], None] = lambda handle: None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Deploy, say so, and wait; the application is deleted however this ends, a Ray that was started here too.

    Args:
        build: makes the application, once Ray is there.
        place: where.
        cluster: the Ray that is started or joined.
        ready: from the server's URL to the line that says it is ready.
        advice: what to do where no replica comes up.
        note: told one line of what happens.
        store_bytes: of an object store that is started, where `cluster` names no size.
        before_end: is given the application's handle before it is deleted, to let it finish what is open.
        is_over: asked every two seconds; without it only Ctrl-C or SIGTERM ends the wait.

    Raises:
        PlacementError: no replica comes up.
    """
    # imported here: Ray Serve takes a second
    from ray import serve

    note("starting Ray")
    joined = ray_session(cluster, f"serve-{place.name}", store_bytes=store_bytes, note=note)
    with joined as session, ServerNotes(session.namespace).shown(note):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        handle: Any = None
        try:
            route = "/" if session.is_local else f"/{place.name}"
            try:
                note("starting Ray Serve and the replica")
                serve.start(http_options={"host": place.host, "port": place.port}, logging_config=quiet)
                handle = serve.run(build(session), name=place.name, route_prefix=route, logging_config=quiet)
            except RlhfSpecError:
                raise
            except Exception as error:
                # a replica that failed, a cluster without room: RuntimeError and others
                raise PlacementError(
                    f"the {place.name} server did not come up: {one_line(str(error))}; {advice}"
                ) from error
            note(ready(place.url(route)))
            _watch(serve, place.name, note, is_over)
        finally:
            with suppress(Exception):  # nothing here may hide what ended the server
                if handle is not None:
                    before_end(handle)
            with suppress(Exception):
                # not `serve.shutdown`: Ray calls the controller's end a fault, and a Ray of our own ends as a whole
                serve.delete(place.name)


def _watch(serve: Any, name: str, note: Callable[[str], None], is_over: Callable[[], bool]) -> None:
    """Say when the number of replicas or the state changes."""
    before = ""
    while not is_over():
        app = serve.status().applications.get(name)
        if app is None:
            note(f"the application {name} was deleted by somebody else; the server ends")
            return
        running = sum(d.replica_states.get("RUNNING", 0) for d in app.deployments.values())
        now = f"{app.status.value.lower()}, {running} {'replica' if running == 1 else 'replicas'}"
        if now != before:
            note(now)
            before = now
        time.sleep(_LOOK_S)
