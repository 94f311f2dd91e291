"""The same rollout under every policy, beside perfect reallocation and the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhfspec.policies.reallocation.by_name import make_reallocation_policy
from rlhfspec.policies.reallocation.gate import GateMode
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.simulate.perfect import least_finish_s, perfect_finish_s
from rlhfspec.policies.simulate.simulation import simulate
from rlhfspec.policies.simulate.simulation_records import Binding, PoolSetup, Samples, SimulationResult

COMPARED = ("static", "pull", "recompute_only", "paper_rule", "finish_time")
"recompute_only is finish_time without migration."


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came out."""

    results: dict[str, SimulationResult]
    perfect_s: float
    "see `policies.simulate.perfect`"
    least_s: float
    "nothing is faster"

    def over(self, name: str, baseline: str) -> float:
        """The baseline's finish time over this one's: above 1 when this one is better."""
        return self.results[baseline].finish_s / self.results[name].finish_s

    def gap_closed(self, name: str) -> float | None:
        """Share of the gap between static and perfect; None where there is none."""
        static_s = self.results["static"].finish_s
        gap_s = static_s - self.perfect_s
        return (static_s - self.results[name].finish_s) / gap_s if gap_s > 1e-3 * static_s else None


def compare(
    samples: Samples,
    setup: PoolSetup,
    names: Sequence[str] = COMPARED,
    *,
    curve: Callable[[], RateCurve] | None = None,
    earlier_lengths: Sequence[int] = (),
    progress: Callable[[str, int], None] | None = None,
) -> Comparison:
    """Simulate the rollout once for each name; each policy starts afresh, and knows what moves take.

    Args:
        samples: of the rollout.
        setup: the pool; its rate curve is the truth.
        names: of COMPARED.
        curve: makes what policies believe of instances, the truth by default; they correct it for themselves.
        earlier_lengths: what policies know of an earlier iteration.
        progress: told the name and the number of finished samples.
    """
    results = {}
    for name in names:
        mode: GateMode = "always_recompute" if name == "recompute_only" else "auto"
        policy = make_reallocation_policy(
            "finish_time" if name == "recompute_only" else name,
            curve=curve() if curve is not None else setup.curve.copy(),
            gate=setup.moves.gate(mode),
            earlier_lengths=earlier_lengths,
        )
        binding: Binding = "static" if name == "static" else "pull"
        told = None if progress is None else (lambda done, name=name: progress(name, done))
        results[name] = simulate(samples, setup, policy, binding=binding, progress=told)
    return Comparison(
        results=results,
        perfect_s=perfect_finish_s(samples, setup),
        least_s=least_finish_s(samples, setup),
    )
