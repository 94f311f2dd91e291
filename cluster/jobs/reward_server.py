"""Runs a reward server until it is told to stop: on a Ray of its own, or as an application of a running cluster."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlhfspec.cluster.placement import machine
from rlhfspec.cluster.placement.ray_session import is_local, ray_session
from rlhfspec.cluster.plan.reward_plan import check_reward
from rlhfspec.core.config import ClusterConfig
from rlhfspec.core.errors import PlacementError, RlhfSpecError, one_line

_LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where the server listens, and in which cluster."""

    name: str = "reward"
    "of the Serve application: `reward.app`"
    host: str = "127.0.0.1"
    port: int = 8000
    address: str | None = None
    "of a running cluster; None: RAY_ADDRESS if set, else a local Ray"


def serve_reward(
    arguments: dict[str, Any],
    place: ServerAddress,
    *,
    note: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Deploy, say so, and wait; the application is deleted however this ends, a Ray that was started here too.

    Args:
        arguments: of `actors.serving.reward_deployment.build`.
        place: where.
        note: told one line of what happens.
        is_over: asked every two seconds; without it only Ctrl-C or SIGTERM ends the wait.

    Raises:
        ConfigError, ModelError: the reward cannot be served.
        PlacementError: the port is taken, or no replica comes up.
    """
    # imported here: Ray Serve takes a second
    from ray import serve

    from rlhfspec.actors.serving.reward_deployment import ServerArguments, build

    application = build(arguments)
    parsed = ServerArguments.model_validate(arguments)
    for line in check_reward(parsed.reward_config(), fields=None).functions:
        note(line)
    cluster = ClusterConfig(address=place.address, dashboard=False)
    if is_local(cluster):
        _require_room(parsed, place)
    with ray_session(cluster, f"serve-{place.name}") as session:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        try:
            route = "/" if session.is_local else f"/{place.name}"
            try:
                serve.start(http_options={"host": place.host, "port": place.port}, logging_config=quiet)
                serve.run(application, name=place.name, route_prefix=route, logging_config=quiet)
            except RlhfSpecError:
                raise
            except (
                Exception
            ) as error:  # a replica that failed, a cluster without room: RuntimeError and others
                raise PlacementError(
                    f"the reward server did not come up: {one_line(str(error))}; expected a replica that builds its "
                    "reward; look at the log of its replica"
                ) from error
            note(
                f"reward server ready: reward.url={_url(place, route)} or, in this Ray cluster, reward.app={place.name}"
            )
            _watch(serve, place.name, note, is_over)
        finally:
            with suppress(Exception):  # nothing here may hide what ended the server
                serve.delete(place.name)
                if session.is_local:
                    serve.shutdown()


def caller_dir() -> str:
    """The folder that reward functions of the caller's are imported from."""
    return os.getcwd()


def _url(place: ServerAddress, route: str) -> str:
    host = socket.gethostname() if place.host in ("0.0.0.0", "::") else place.host
    return f"http://{host}:{place.port}{route.rstrip('/')}/score"


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


def _require_room(arguments: Any, place: ServerAddress) -> None:
    """Raise PlacementError where a local Ray could not hold the replicas, or the port is taken."""
    needed, cores = arguments.max_replicas * arguments.num_cpus, machine.num_cores()
    if needed > cores:
        raise PlacementError(
            f"{arguments.max_replicas} replicas of {arguments.num_cpus:g} CPUs need {needed:g}, this machine has "
            f"{cores}; lower --replicas or --num-cpus, or name a cluster with --address"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just given up is free
        try:
            probe.bind((place.host, place.port))
        except (OSError, OverflowError) as error:
            raise PlacementError(
                f"port {place.port} of {place.host} cannot be taken: {error}; name another with --port"
            ) from None
