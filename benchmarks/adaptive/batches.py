"""Every policy at constant batch sizes, timed side by side: decode steps with a full batch only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.adaptive.by_batch_size import BatchTablePolicy, CapacityPolicy
from benchmarks.adaptive.pairs import Contestant, engine_for
from benchmarks.support.timing import Rate, interleaved
from benchmarks.support.workload import Workload
from rlhfspec.core.config import SpeculationConfig
from rlhfspec.core.records import SampleRequest
from rlhfspec.engine.engine import Engine
from rlhfspec.profiles.profile import Profile

FIXED = {
    "chain 2": SpeculationConfig(policy="fixed", num_nodes=2),
    "chain 4": SpeculationConfig(policy="fixed", num_nodes=4),
    "chain 8": SpeculationConfig(policy="fixed", num_nodes=8),
    "chain 12": SpeculationConfig(policy="fixed", num_nodes=12),
    "chain 16": SpeculationConfig(policy="fixed", num_nodes=16, depth=16),
    "tree 8": SpeculationConfig(policy="fixed", num_nodes=8, depth=5, branching=2),
}
WEAK_FIXED = {name: FIXED[name] for name in ("chain 2", "chain 4", "tree 8")} | {
    "chain 3": SpeculationConfig(policy="fixed", num_nodes=3)
}
OTHERS: dict[str, Contestant] = {
    "capacity": CapacityPolicy(capacity_tokens=24, max_nodes=16, depth=16, branching=1),
    "batch_table": BatchTablePolicy(max_nodes=16, max_depth=16),
    "bandit": SpeculationConfig(policy="bandit"),
}
MAIN_FIXED = {name: FIXED[name] for name in ("chain 4", "chain 8", "chain 12", "chain 16")}
PLAIN = {"plain": SpeculationConfig(policy="off")}
GOODPUT = {"goodput": SpeculationConfig(policy="goodput")}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """One batch size: rates of every round by policy, and what goodput spent on choosing."""

    batch_size: int
    rates: Mapping[str, Sequence[float]]
    select_s: float
    "seconds a decode step"
    select_share: float

    def median(self, name: str) -> float:
        """Tokens per second."""
        return statistics.median(self.rates[name])

    def ratios(self, a: str, b: str) -> list[float]:
        """A / b of every round."""
        return [x / y for x, y in zip(self.rates[a], self.rates[b], strict=True)]

    def best(self, names: Sequence[str]) -> str:
        """The fastest of some policies in the median."""
        return max(names, key=self.median)

    def rows(self, **labels: Any) -> list[dict[str, Any]]:
        """One row a policy and round."""
        return [
            {"part": "batch", "batch_size": self.batch_size, "policy": name, "tokens_per_s": value, **labels}
            for name, values in self.rates.items()
            for value in values
        ]


def constant_batch(
    workload: Workload,
    policies: Mapping[str, Contestant],
    profile: Profile,
    batch_size: int,
    rounds: int,
    *,
    draft: str = "good",
) -> BatchResult:
    """Time every policy on a batch that is kept full from a queue."""
    engines = {
        name: engine_for(workload, contestant, batch_size=batch_size, draft=draft, profile=profile)
        for name, contestant in policies.items()
    }
    requests = workload.requests()[: batch_size + 4 + min(batch_size, 12)]
    rates = interleaved(
        {name: _full_batch_rate(engine, requests, batch_size) for name, engine in engines.items()}, rounds
    )
    adaptive = engines.get("goodput")
    stats = adaptive.stats if adaptive else None
    return BatchResult(
        batch_size=batch_size,
        rates=rates,
        select_s=stats.select_s / stats.num_decode_steps if stats else 0.0,
        select_share=stats.select_s / stats.busy_s if stats else 0.0,
    )


def _full_batch_rate(engine: Engine, requests: Sequence[SampleRequest], batch_size: int) -> Rate:
    def rate() -> float:
        tokens, seconds = 0, 0.0
        for request in requests:
            engine.submit(request)
        while engine.has_work and (engine.num_waiting or engine.num_running == batch_size):
            engine.step()
            record = engine.step_records[-1]
            if record.num_samples == batch_size:
                tokens += record.num_emitted_tokens
                seconds += record.step_s
        engine.cancel_all()
        return tokens / seconds

    return rate
