"""The same rollout under every policy, beside perfect reallocation and the bound.

Perfect reallocation is what moving samples could bring at most, within a rule: samples are admitted in order of arrival
as slots free anywhere; those admitted are spread anew whenever one ends, at no cost: the numbers of any two instances
differ by one at most, and where they do, the samples with the longest true remainder are on the emptier, faster ones.
It is no bound on what admits the longest first, or crowds short samples together so that a long one may run alone;
`least_finish_s` is a bound on everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..reallocation.by_name import make_reallocation_policy
from ..reallocation.gate import GateMode
from ..reallocation.rate_curve import RateCurve
from .simulated_pool import simulate
from .simulation_records import Binding, PoolSetup, Samples, SimulationResult

COMPARED = ("static", "pull", "recompute_only", "paper_rule", "finish_time")
"recompute_only is finish_time without migration."
EXACT_SAMPLES = 256
"With more samples running, they are spread anew after a 256th of them has ended."
STEP_TOKENS = 16.0
"Or after so many tokens: contexts grow meanwhile."


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came out."""

    results: dict[str, SimulationResult]
    perfect_s: float
    "of `perfect_finish_s`"
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
        report = None if progress is None else (lambda done, name=name: progress(name, done))
        results[name] = simulate(samples, setup, policy, binding=binding, progress=report)
    return Comparison(
        results=results,
        perfect_s=perfect_finish_s(samples, setup),
        least_s=least_finish_s(samples, setup),
    )


def perfect_finish_s(samples: Samples, setup: PoolSetup) -> float:
    """Seconds until the last sample is done; prompts are computed by all instances together, at no wait."""
    num_instances = setup.num_instances
    to_go, context = samples.response_tokens / samples.speed, samples.prompt_tokens.astype(float)
    room = num_instances * setup.num_slots
    running, waiting = np.split(np.arange(len(samples)), [room])
    now_s = float(samples.prompt_tokens.sum()) * setup.prompt_token_s / num_instances
    while len(running):
        # longest first, so the emptier instances have the front of the line
        running = running[np.argsort(-to_go[running], kind="stable")]
        share, more = divmod(len(running), num_instances)
        num_emptier = (num_instances - more) * share
        sizes = np.array([share, share + 1])
        # as they are in the middle of the step
        grown = min(float(to_go[running[-1]]), STEP_TOKENS) / 2.0
        pace = setup.curve.seconds_per_token(sizes, sizes * (context[running].mean() + grown))
        seconds = np.where(np.arange(len(running)) < num_emptier, pace[0], pace[1])
        count = max(1, len(running) // EXACT_SAMPLES)
        end_s = float(np.partition(to_go[running] * seconds, count - 1)[count - 1])
        step_s = min(end_s, STEP_TOKENS * float(seconds.min()))
        now_s += step_s
        to_go[running] -= step_s / seconds
        context[running] += step_s / seconds * samples.speed[running]
        running = running[to_go[running] > 1e-9]
        admitted, waiting = np.split(waiting, [room - len(running)])
        running = np.concatenate([running, admitted])
    return now_s


def least_finish_s(samples: Samples, setup: PoolSetup) -> float:
    """A time that nothing beats: no rule, no order of arrival, all lengths known, moves at no cost.

    A sample that shares an instance with B - 1 others takes a B-th part of it and gets 1 / seconds_per_token(B) tokens
    a second; contexts are taken to stay as short as the shortest prompt. So a sample that must get r tokens a second
    takes at least c(r) of an instance, c being the lower convex hull of these points; a time T is long enough only if
    c(tokens / T) summed over the samples is at most K.
    """
    counts = np.arange(1, setup.num_slots + 1)
    pace = setup.curve.seconds_per_token(counts, counts * float(samples.prompt_tokens.min()))
    rate, part = _lower_hull(np.append(1.0 / pace[::-1], 0.0), np.append(1.0 / counts[::-1], 0.0))
    to_go = samples.response_tokens / samples.speed
    low, high = float(to_go.max()) / rate[-1], float(to_go.sum()) / rate[-1]
    for _ in range(60):
        middle = (low + high) / 2
        taken = float(np.interp(to_go / middle, rate, part).sum())
        low, high = (low, middle) if taken <= setup.num_instances else (middle, high)
    return high


def _lower_hull(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the lower convex hull, x ascending."""
    corners: list[tuple[float, float]] = []
    for point in sorted(zip(x.tolist(), y.tolist(), strict=True)):
        if corners and corners[-1][0] == point[0]:
            continue
        while len(corners) > 1 and _turns_right(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    hull = np.array(corners)
    return hull[:, 0], hull[:, 1]


def _turns_right(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])
