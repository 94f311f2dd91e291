"""Where a supervised job runs: in this process, or as several actors on Ray that learn as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...core.errors import RlhfSpecError, WaitTimeout
from ...core.settings.cluster import ClusterConfig
from ...core.settings.supervised import SupervisedConfig
from ...engine.numerics import resolve_device
from ...learning.training.supervised_job import StepReport, SupervisedJob, run_job

_GRACE_S = 30.0
"This process waits longer than trainers wait for each other, so that their own messages arrive."


def run(config: SupervisedConfig, job: SupervisedJob, *, run_id: str) -> Iterator[StepReport]:
    """Run a job to its end and yield its reports.

    Raises PlacementError, InstanceLost, WaitTimeout, and what `run_job` raises.
    """
    if config.cluster.trainer.num_actors == 1:
        yield from run_job(job, device=resolve_device(config.trainer.device, "trainer.device"))
        return
    # seconds to import, and needed here only
    from ..ray_start.ray_session import ray_session

    with ray_session(config.cluster.model_copy(update={"dashboard": False}), run_id) as session:
        yield from _on_ray(config, job, session.namespace, is_local=session.is_local)


def _on_ray(
    config: SupervisedConfig, job: SupervisedJob, namespace: str, *, is_local: bool
) -> Iterator[StepReport]:
    import ray

    from ...actors.remote.waiting import get_all
    from ...actors.workers.supervised_actor import SupervisedActor
    from ..plan.topology import PlacementContext, actor_options

    cluster = config.cluster
    with _places(config, is_local=is_local) as (places, group):
        context = PlacementContext(group=group, namespace=namespace)
        size = len(places)
        trainers: dict[str, Any] = {
            place.name: SupervisedActor.options(**actor_options(place, context)).remote(
                place.name, rank, size, cluster.order_timeout_s
            )
            for rank, place in enumerate(places)
        }
        first_name = places[0].name
        first = trainers[first_name]
        # one copy for all; the first's place comes when it is there
        shared = ray.put(job)
        meeting = first.open_group.remote(cluster.start_timeout_s)
        joins = {name: one.join_group.remote(meeting, shared) for name, one in trainers.items()}
        get_all(
            joins,
            waiter="the command",
            order="join the group of trainers",
            timeout_s=cluster.start_timeout_s,
        )
        others = {name: one.take_part.remote(shared) for name, one in trainers.items() if one is not first}
        stream = first.reports.options(num_returns="streaming").remote(shared)
        yield from _reports(stream, first_name, others, cluster)
        get_all(others, waiter="the command", order="train", timeout_s=cluster.order_timeout_s)


def _reports(
    stream: Any, first_name: str, others: dict[str, Any], cluster: ClusterConfig
) -> Iterator[StepReport]:
    """What the first trainer reports. A trainer that failed is named instead, whoever noticed it."""
    import ray
    from ray.exceptions import RayError

    from ...actors.remote.waiting import get_all

    # the first report comes after the model is loaded
    limit_s = cluster.start_timeout_s + cluster.order_timeout_s + _GRACE_S
    step = 0
    while True:
        ready, _ = ray.wait([stream], timeout=limit_s, fetch_local=False)
        if not ready:
            raise WaitTimeout(
                waiter="the command",
                waited_for=first_name,
                order=f"take step {step + 1}",
                waited_s=limit_s,
                advice="raise cluster.order_timeout_s if a step is only slow",
            )
        try:
            ref = next(stream)
        except StopIteration:
            return
        try:
            answer = get_all(
                {first_name: ref}, waiter="the command", order=f"take step {step + 1}", timeout_s=limit_s
            )
        except (RlhfSpecError, RayError):
            # who died or failed first explains why
            get_all({first_name: ref, **others}, waiter="the command", order="train", timeout_s=_GRACE_S)
            raise
        report: StepReport = answer[first_name]
        step = report.step
        limit_s = cluster.order_timeout_s + _GRACE_S
        yield report


@contextmanager
def _places(config: SupervisedConfig, *, is_local: bool) -> Iterator[tuple[list[Any], Any]]:
    from ray.util.placement_group import remove_placement_group

    from ..plan.topology import MIN_CPUS, PlacementSlot, Topology, place

    pool = config.cluster.trainer
    places = [
        PlacementSlot(
            name=f"trainer-{index}",
            bundle=index,
            num_cpus=max(pool.num_cpus, MIN_CPUS),
            num_gpus=pool.num_gpus,
            num_threads=config.trainer.num_threads,
        )
        for index in range(pool.num_actors)
    ]
    topology = Topology(
        # nobody schedules here: the first trainer has that place
        scheduler=places[0],
        trainer=tuple(places[1:]),
        generation=(),
        reward=(),
        strategy=config.cluster.placement,
        placement_timeout_s=config.cluster.placement_timeout_s,
    )
    group = place(topology, is_local=is_local)
    try:
        yield places, group
    finally:
        remove_placement_group(group)
