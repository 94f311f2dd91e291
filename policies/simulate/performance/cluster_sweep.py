"""Tries every combination of some values of a simulated cluster's config, and names the one with the shortest step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import ConfigError
from core.settings.simulated_cluster import SimulatedClusterConfig
from policies.simulate.performance.cluster_simulation import ClusterResult, simulate_cluster
from policies.simulate.performance.described_cluster import describe
from policies.simulate.performance.draft_yields import even_acceptance
from profiles.profile import Profile

MOST_COMBINATIONS = 500


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

    Raises ConfigError for a list of another length, or too many combinations.
    """
    columns = []
    for key, values in axes.items():
        names = [name.strip() for name in key.split(",")]
        column = []
        for value in values:
            several = value if len(names) > 1 else [value]
            if not isinstance(several, list | tuple) or len(several) != len(names):
                raise ConfigError(f"sweep.{key} expects lists of {len(names)} values, got {value!r}")
            column.append(dict(zip(names, several, strict=True)))
        columns.append(column)
    count = int(np.prod([len(column) for column in columns])) if columns else 0
    if not 1 <= count <= MOST_COMBINATIONS:
        raise ConfigError(f"the sweep has {count} combinations; expected 1 to {MOST_COMBINATIONS}")
    return [{k: v for part in chosen for k, v in part.items()} for chosen in itertools.product(*columns)]


def changed(config: SimulatedClusterConfig, values: Mapping[str, Any]) -> SimulatedClusterConfig:
    """Return the config with these values; another depth keeps the acceptance of a level, not the length.

    Raises ConfigError for a key that is none, or values that contradict each other.
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
        said = "; ".join(str(item["msg"]) for item in getattr(error, "errors", list)())
        raise ConfigError(f"sweep: {dict(values)}: {said or error}") from None


def sweep(
    config: SimulatedClusterConfig,
    axes: Mapping[str, Sequence[Any]],
    *,
    recorded: np.ndarray | None = None,
    profile: Profile | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Tried]:
    """Simulate every combination, in order; `progress` is told how many are done.

    What cannot be is kept with its reason. Raises ConfigError for axes that are none.
    """
    rows = []
    for number, values in enumerate(combinations(axes)):
        if progress is not None:
            progress(number)
        try:
            one = changed(config, values)
        except ConfigError as error:
            if "is no key" in str(error):
                raise
            rows.append(Tried(values=values, gpus=0, result=None, refused=str(error)))
            continue
        pools = one.pools
        gpus = pools.instances * pools.tensor_parallel + (0 if pools.colocated else pools.trainer_gpus)
        try:
            result = simulate_cluster(describe(one, recorded), profile=profile)
        except ConfigError as error:
            rows.append(Tried(values=values, gpus=gpus, result=None, refused=str(error)))
        else:
            rows.append(Tried(values=values, gpus=gpus, result=result))
    return rows


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
