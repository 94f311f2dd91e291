"""Speed-ups of simulated rollouts, for the papers' cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.simulate.cluster_simulation import simulate_cluster
from rlhfspec.policies.simulate.described_cluster import describe


def rollout_speedup(sections: Mapping[str, Mapping[str, Any]]) -> float:
    """Plain seconds of one rollout over those with drafts, both under the same reallocation policy."""
    tree = {name: dict(keys) for name, keys in sections.items()}
    tree["step"] = {"steps": 1}
    return simulate_cluster(describe(SimulatedClusterConfig.model_validate(tree))).rollout_speedup
