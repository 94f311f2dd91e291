"""Runs a reward server until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.config import ClusterConfig
from ...core.errors import PlacementError
from ..plan.reward_plan import check_reward
from ..ray_start import machine
from ..ray_start.forked_workers import is_local
from .ray_serve import ServerAddress, serve_application


def serve_reward(
    arguments: dict[str, Any],
    place: ServerAddress,
    *,
    note: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Deploy, say so, and wait, see `serve_application`.

    `arguments`: of `actors.reward_server.reward_deployment.build`.
    Raises ConfigError, ModelError: the reward cannot be served; PlacementError: the port is taken, no room, no replica.
    """
    # imported here: Ray Serve takes a second
    from ...actors.reward_server.reward_deployment import ServerArguments, build

    application = build(arguments)
    parsed = ServerArguments.model_validate(arguments)
    for line in check_reward(parsed.reward_config(), fields=None).functions:
        note(line)
    cluster = ClusterConfig(address=place.address, dashboard=False)
    if is_local(cluster.address):
        _require_room(parsed)
        place.require_free()
    serve_application(
        lambda session: application,
        place,
        cluster=cluster,
        ready=lambda url: (
            f"reward server ready: reward.url={url}/score or, in this Ray cluster, reward.app={place.name}"
        ),
        advice="expected a replica that builds its reward; look at the log of its replica",
        note=note,
        is_over=is_over,
    )


def _require_room(arguments: Any) -> None:
    """Raise PlacementError where a local Ray could not hold the replicas."""
    needed, cores = arguments.max_replicas * arguments.num_cpus, machine.num_cores()
    if needed > cores:
        raise PlacementError(
            f"{arguments.max_replicas} replicas of {arguments.num_cpus:g} CPUs need {needed:g}, this machine has "
            f"{cores}; lower --replicas or --num-cpus, or name a cluster with --address"
        )
