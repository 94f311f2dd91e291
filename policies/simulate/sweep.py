"""Tries every combination of some values of a simulated cluster's config, and names the one with the shortest step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...core.settings.simulated_cluster import SimulatedClusterConfig
from ...profiles.profile import Profile
from .analytic_instance import even_acceptance
from .cluster_simulation import ClusterResult, require_bounded, simulate_cluster
from .described_cluster import DescribedCluster, describe
from .roofline import ContradictionError

MOST_COMBINATIONS = 500
READ_ONCE = ("lengths.file", "device.profile")
"Files of the whole sweep."


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One combination; before it is simulated there is neither result nor, where it cannot be, a cluster."""

    values: dict[str, Any]
    "dotted key to value"
    gpus: int
    cluster: DescribedCluster | None = None
    result: ClusterResult | None = None
    refused: str = ""
    "why there is no cluster, or no result"

    @property
    def label(self) -> str:
        """Keys without their sections, and their values."""
        return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in self.values.items())


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
    rows = planned(config, axes, recorded=recorded)
    for number, row in enumerate(rows):
        if row.cluster is None:
            continue
        report = None if progress is None else _named(progress, f"{number + 1} of {len(rows)}")
        try:
            rows[number] = replace(
                row, result=simulate_cluster(row.cluster, profile=profile, progress=report)
            )
        except ConfigError as error:
            rows[number] = replace(row, refused=str(error))
    return rows


def planned(
    config: SimulatedClusterConfig, axes: Mapping[str, Sequence[Any]], *, recorded: np.ndarray | None = None
) -> list[Tried]:
    """Return every combination, described; nothing is simulated. Raises ConfigError as `sweep`."""
    rows = []
    for values in combinations(axes):
        gpus = 0
        try:
            one = changed(config, values)
            pools = one.pools
            gpus = pools.instances * pools.tensor_parallel + (0 if pools.colocated else pools.trainer_gpus)
            rows.append(Tried(values=values, gpus=gpus, cluster=describe(one, recorded)))
        except ContradictionError as error:
            rows.append(Tried(values=values, gpus=gpus, refused=str(error)))
    require_bounded([row.cluster.config for row in rows if row.cluster is not None])
    return rows


def _named(progress: Callable[[str, int], None], number: str) -> Callable[[str, int], None]:
    return lambda rollout, done: progress(f"{number}: {rollout}", done)


def best(rows: Sequence[Tried]) -> Tried | None:
    """The shortest step of those whose memory suffices; fewer GPUs where two are equal; None without any."""
    fitting = [
        (row.result.speculative.step_s, row.gpus, number)
        for number, row in enumerate(rows)
        if row.result and row.result.memory.instance_fits and row.result.memory.trainer_fits
    ]
    return rows[min(fitting)[-1]] if fitting else None


def default_axes(config: SimulatedClusterConfig) -> dict[str, Sequence[Any]]:
    """What is tried where the config says nothing: drafts, GPUs of an instance and between the pools, staleness."""
    axes: dict[str, Sequence[Any]] = {}
    if config.drafter.kind != "none" and config.drafter.nodes is None and config.device.profile is None:
        axes["drafter.policy,drafter.depth"] = [
            *(("fixed", depth) for depth in (1, 3, 5)),
            ("adaptive", 3),
        ]
    pools = config.pools
    whole = pools.instances * pools.tensor_parallel + pools.trainer_gpus
    if not pools.colocated:
        tried = {
            (gpus, max(round(whole * share / gpus), 1))
            for gpus in (pools.tensor_parallel, 2 * pools.tensor_parallel)
            for share in (0.25, 0.5, 0.75)
        }
        axes["pools.tensor_parallel,pools.instances,pools.trainer_gpus"] = [
            (gpus, count, whole - count * gpus) for gpus, count in sorted(tried) if whole > count * gpus
        ]
        axes["step.staleness"] = [0, 1]
    return axes


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination; a key with commas names several keys, whose values are lists of as many.

    Raises ConfigError for a list of another length, a key or a value that comes twice, a file, or too many of them.
    """
    columns = []
    every = [name.strip() for key in axes for name in key.split(",")]
    for name, count in Counter(every).items():
        if count > 1:
            raise ConfigError(
                f"sweep: {name} comes {count} times, and one would overwrite the other; name it in one key"
            )
        if name in READ_ONCE:
            raise ConfigError(f"sweep: {name} is read once for the whole sweep; run one sweep for each file")
        if name.split(".")[0] == "sweep":
            raise ConfigError(f"sweep: {name} cannot be swept; expected a key of another section")
    for key, values in axes.items():
        names = [name.strip() for name in key.split(",")]
        column = []
        for number, value in enumerate(values):
            if value in values[:number]:
                raise ConfigError(f"sweep.{key}: {value!r} comes twice; the same would be simulated again")
        for value in values:
            several = value if len(names) > 1 else [value]
            if not isinstance(several, list | tuple) or len(several) != len(names):
                raise ConfigError(f"sweep.{key} expects lists of {len(names)} values, got {value!r}")
            column.append(dict(zip(names, several, strict=True)))
        columns.append(column)
    count = math.prod(len(column) for column in columns) if columns else 0
    if not 1 <= count <= MOST_COMBINATIONS:
        raise ConfigError(f"the sweep has {count} combinations; expected 1 to {MOST_COMBINATIONS}")
    return [{k: v for part in chosen for k, v in part.items()} for chosen in itertools.product(*columns)]


def changed(config: SimulatedClusterConfig, values: Mapping[str, Any]) -> SimulatedClusterConfig:
    """Return the config with these values; another depth keeps the acceptance of a level, not the length.

    Raises ConfigError for a key that is none or a value that it cannot have; ContradictionError for values that
    contradict each other.
    """
    tree = config.model_dump()
    drafter = config.drafter
    if "drafter.depth" in values and drafter.acceptance is None and drafter.nodes is None:
        tree["drafter"]["acceptance"] = (even_acceptance(drafter.acceptance_length, drafter.depth),)
    for key, value in values.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.get(parent)
            if not isinstance(node, dict):
                raise ConfigError(
                    f"sweep: {key} is no key of this config; see core/settings/simulated_cluster.py"
                )
        if leaf not in node:
            raise ConfigError(f"sweep: {key} is no key of this config; known here: {', '.join(node)}")
        node[leaf] = value
    try:
        return SimulatedClusterConfig.model_validate(tree)
    except ValueError as error:
        faults: list[dict[str, Any]] = getattr(error, "errors", list)()
        for fault in faults:
            if fault["type"] != "value_error":
                key = ".".join(map(str, fault["loc"]))
                raise ConfigError(f"sweep: {key}: {fault['msg']}, got {fault['input']!r}") from None
        said = "; ".join(str(fault["msg"]) for fault in faults)
        raise ContradictionError(f"sweep: {dict(values)}: {said}") from None
