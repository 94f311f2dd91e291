"""Tries every combination of some values of a simulated cluster's config, and names the one with the shortest step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import ConfigError
from core.settings.simulated_cluster import SimulatedClusterConfig
from policies.simulate.performance.cluster_simulation import ClusterResult, simulate_cluster
from policies.simulate.performance.contradiction import ContradictionError
from policies.simulate.performance.described_cluster import DescribedCluster, describe
from policies.simulate.performance.simulated_work import require_bounded
from policies.simulate.performance.sweep_axes import changed, combinations
from profiles.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One combination."""

    values: dict[str, Any]
    "dotted key to value"
    gpus: int
    result: ClusterResult | None
    refused: str = ""
    "why there is no result"

    @property
    def label(self) -> str:
        """Keys without their sections, and their values."""
        return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in self.values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One combination before it is simulated."""

    values: dict[str, Any]
    gpus: int
    cluster: DescribedCluster | None
    refused: str = ""
    "why there is no cluster"


def sweep(
    config: SimulatedClusterConfig,
    axes: Mapping[str, Sequence[Any]],
    *,
    recorded: np.ndarray | None = None,
    profile: Profile | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> list[Tried]:
    """Simulate every combination, in order, after all of them were looked at.

    Args:
        config: what the combinations change.
        axes: see `combinations`.
        recorded: lengths to draw from.
        profile: as of `simulate_cluster`.
        progress: told the rollout, such as "3 of 12: plain 1", and how many of its samples are done.

    What cannot be is kept with its reason. Raises ConfigError, before anything is simulated, for axes that are none, a
    value that a key cannot have, or more samples than a simulation may play.
    """
    plans = planned(config, axes, recorded=recorded)
    rows = []
    for number, plan in enumerate(plans, start=1):
        if plan.cluster is None:
            rows.append(Tried(values=plan.values, gpus=plan.gpus, result=None, refused=plan.refused))
            continue
        told = None if progress is None else _named(progress, f"{number} of {len(plans)}")
        try:
            result = simulate_cluster(plan.cluster, profile=profile, progress=told)
        except ConfigError as error:
            rows.append(Tried(values=plan.values, gpus=plan.gpus, result=None, refused=str(error)))
        else:
            rows.append(Tried(values=plan.values, gpus=plan.gpus, result=result))
    return rows


def planned(
    config: SimulatedClusterConfig, axes: Mapping[str, Sequence[Any]], *, recorded: np.ndarray | None = None
) -> list[Planned]:
    """Return every combination, described; nothing is simulated. Raises ConfigError as `sweep`."""
    plans = []
    for values in combinations(axes):
        gpus = 0
        try:
            one = changed(config, values)
            pools = one.pools
            gpus = pools.instances * pools.tensor_parallel + (0 if pools.colocated else pools.trainer_gpus)
            plans.append(Planned(values=values, gpus=gpus, cluster=describe(one, recorded)))
        except ContradictionError as error:
            plans.append(Planned(values=values, gpus=gpus, cluster=None, refused=str(error)))
    require_bounded([plan.cluster.config for plan in plans if plan.cluster is not None])
    return plans


def _named(progress: Callable[[str, int], None], number: str) -> Callable[[str, int], None]:
    return lambda rollout, done: progress(f"{number}: {rollout}", done)


def best(rows: Sequence[Tried]) -> Tried | None:
    """The shortest step of those whose memory suffices; fewer GPUs where two are equal; None without any."""
    fitting = [
        row
        for row in rows
        if row.result and row.result.memory.instance_fits and row.result.memory.trainer_fits
    ]
    return min(fitting, key=_order, default=None)


def _order(row: Tried) -> tuple[float, int]:
    assert row.result is not None
    return row.result.speculative.step_s, row.gpus
