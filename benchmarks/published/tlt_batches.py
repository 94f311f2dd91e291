"""TLT's table of batch sizes (arXiv 2511.16665, figure 13 and table 4): Qwen2.5-32B on four H100, trees of EAGLE.

Speed-ups of steady decoding with trees 10 deep. What the engine adds to a speculative step is not published as such:
once it is ours (vLLM's chains), once it is taken from the published rows of other depths at batch 1.
"""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.published.dimensions import QWEN25_32B
from benchmarks.published.row import Row, ranged
from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.simulate.analytic_instance import AnalyticInstance
from rlhfspec.policies.simulate.described_cluster import describe

DEPTHS = (4, 6, 8, 10, 12, 16)
VERIFIED = (16, 32, 48, 64, 96, 128)
ACCEPTANCE = np.array(
    [
        [4.63, 4.74, 4.78, 4.81, 4.81, 4.82],
        [5.71, 6.08, 6.16, 6.31, 6.31, 6.36],
        [6.34, 7.01, 7.24, 7.39, 7.49, 7.51],
        [6.80, 7.63, 7.97, 8.21, 8.31, 8.39],
        [7.02, 8.05, 8.49, 8.76, 8.86, 9.06],
        [7.25, 8.44, 8.97, 9.23, 9.51, 9.78],
    ]
)
"[depth, verified] tokens a step, batch 1, 8 candidates a node."
SPEEDUP = np.array(
    [
        [2.71, 2.67, 2.63, 2.60, 2.51, 2.40],
        [3.09, 3.16, 3.15, 3.17, 3.06, 2.94],
        [3.19, 3.40, 3.43, 3.47, 3.39, 3.29],
        [3.22, 3.46, 3.56, 3.62, 3.56, 3.46],
        [3.12, 3.47, 3.58, 3.66, 3.59, 3.54],
        [2.94, 3.26, 3.41, 3.48, 3.49, 3.45],
    ]
)
"[depth, verified] over plain decoding, batch 1."
BATCHES = (1, 2, 4, 8, 16, 32)
PUBLISHED = {64: (3.62, 3.38, 2.98, 2.27, 1.91, 1.70), 16: (3.22, 3.08, 3.01, 2.73, 2.67, 2.48)}
"Verified tokens to the speed-up at each batch."
COMPARED_DEPTH = 10
WIDTH = 8
CONTEXTS = (500, 2000, 8000)
COMPUTE = (0.5, 0.6, 0.75)


def rows() -> list[Row]:
    """The twelve figures, with the engine's share from other depths; the range holds our own share too."""
    made = []
    cases = list(itertools.product(CONTEXTS, COMPUTE))
    instances = {share: instance(share) for share in COMPUTE}
    fitted = {case: engine_share(instances[case[1]], case[0]) for case in cases}
    ours = (0.0, SimulatedClusterConfig().drafter.step_s)
    for verified, figures in PUBLISHED.items():
        for batch, published in zip(BATCHES, figures, strict=True):
            middle = speedup(instances[0.6], batch, verified, 2000, fitted[2000, 0.6])
            others = [
                speedup(instances[share], batch, verified, context, engine)
                for context, share in cases
                for engine in (fitted[context, share], ours)
            ]
            made.append(
                ranged(
                    f"tlt_{verified}_b{batch}",
                    published,
                    middle,
                    others,
                    matters="known: model, 4 H100, depth 10, verified tokens, acceptance length at batch 1. Not known: "
                    "context (500 to 8k, middle 2k), share of products reached (0.5 to 0.75, middle 0.6), what the "
                    "engine adds (our default to what the published rows of other depths at batch 1 give, the middle)",
                )
            )
    return made


def instance(compute_share: float) -> AnalyticInstance:
    """Four H100 that share the model and its one-layer draft model with the target's vocabulary."""
    return describe(
        SimulatedClusterConfig.model_validate(
            {
                "model": {"dimensions": QWEN25_32B},
                "device": {"name": "H100", "compute_share": compute_share},
                "pools": {"tensor_parallel": 4},
                "drafter": {
                    "policy": "fixed",
                    "depth": COMPARED_DEPTH,
                    "nodes": 63,
                    "width": WIDTH,
                    "acceptance_length": 8.21,
                    "vocab_size": QWEN25_32B["vocab_size"],
                    "step_s": 0.0,
                },
            }
        )
    ).instance


def engine_share(made: AnalyticInstance, context: int) -> tuple[float, float]:
    """Seconds that the engine adds to a level and to a step: least squares at batch 1, over all other depths."""
    terms, left = [], []
    for (row, depth), (column, verified) in itertools.product(enumerate(DEPTHS), enumerate(VERIFIED)):
        if depth == COMPARED_DEPTH:
            continue
        took_s = float(ACCEPTANCE[row, column] / SPEEDUP[row, column]) * made.plain_s(1, context)
        modelled_s = made.speculative_s(1, context, nodes=verified - 1, levels=depth, width=WIDTH)
        # relative errors count alike
        terms.append([depth / took_s, 1.0 / took_s])
        left.append((took_s - modelled_s) / took_s)
    level_s, step_s = np.linalg.lstsq(np.array(terms), np.array(left), rcond=None)[0]
    return float(level_s), float(step_s)


def speedup(
    made: AnalyticInstance, batch: int, verified: int, context: int, engine: tuple[float, float]
) -> float:
    """Speed-up of steady decoding with a tree of the compared depth."""
    length = float(ACCEPTANCE[DEPTHS.index(COMPARED_DEPTH), VERIFIED.index(verified)])
    held = batch * context
    step_s = made.speculative_s(batch, held, nodes=verified - 1, levels=COMPARED_DEPTH, width=WIDTH)
    level_s, fixed_s = engine
    return length * made.plain_s(batch, held) / (step_s + COMPARED_DEPTH * level_s + fixed_s)
