"""NeMo-RL's speculative rollouts (arXiv 2604.26779): the measured 8B table and the projections for 235B.

Steps follow from published seconds or from the other projection; rollouts lack what they depend on most.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from benchmarks.published.dimensions import QWEN3_8B, QWEN3_235B
from benchmarks.published.rollouts import rollout_speedup
from benchmarks.published.row import Row, ranged
from rlhfspec.policies.simulate.cluster_simulation import bound

MEASURED = {"zero": (100.0, 151.2, 1.77, 1.41), "think": (133.6, 185.3, 1.54, 1.35)}
"Plain seconds of generation and of the step; speed-ups of both."
PROJECTED = {3: (3.0, 2.72, 1.70), 7: (5.0, 4.07, 1.96)}
"Levels to acceptance length, speed-ups of rollout and step."
ASYNCHRONOUS = (3.5, 2.5)
"Rollout and step on 2,048 GPUs."

ACCEPTANCE = (2.2, 3.0, 3.4)
"At 3 levels. Least: Qwen3-8B's public head, 1.99 at 2 levels (AngelSlim 0.3), a level deeper; middle: what the \
paper's projection takes for 3 levels; most: 3.32 with MTP in training (SkyRL), rounded up."
SAMPLES_PER_GPU = (16, 64)
"512 and 2,048 samples a step on 32 GPUs."
LIMITS = (4096, 16384)
ENGINE_S = (0.43e-3, 1.6e-3)
"What the engine adds to a speculative step: least and most of the seven public rates whose median is our default."
LENGTHS = (("equal", 8192), ("long_tail", 16384), ("long_tail", 32768))
"Of the projections' responses: how they are drawn, and their limit."
LAYOUTS = (("tensor", 8), ("tensor", 4), ("expert", 32))
"How an instance's GPUs split the model, and their number; the first is the middle, 4 are a tray."
_Case = tuple[int, tuple[str, int], tuple[str, int], bool]


def rows_8b() -> list[Row]:
    """The four figures of the 8B table."""

    def rollout(acceptance: float, samples: int, limit: int, engine_s: float | None = None) -> float:
        engine = {} if engine_s is None else {"step_s": engine_s}
        return rollout_speedup(
            {
                "model": {"dimensions": QWEN3_8B},
                "device": {"name": "GB200"},
                "pools": {"instances": 32, "trainer_gpus": 32, "colocated": True},
                "lengths": {"samples": 32 * samples, "max_new_tokens": limit},
                "drafter": {"policy": "fixed", "depth": 3, "acceptance_length": acceptance} | engine,
                "reallocation": {"policy": "static"},
            }
        )

    grid = itertools.product((ACCEPTANCE[0], ACCEPTANCE[-1]), SAMPLES_PER_GPU, LIMITS, ENGINE_S)
    others = [rollout(*case) for case in grid]
    central = rollout(ACCEPTANCE[1], 32, 8192)
    rows = []
    for name, (plain_s, step_s, faster, step_faster) in MEASURED.items():
        rows.append(
            ranged(
                f"nemo_8b_{name}_rollout",
                faster,
                central,
                others,
                matters="known: model, 32 GB200, k 3. Not known: acceptance length (2.2 to 3.4, middle 3.0), samples a "
                "GPU (16 to 64, middle 32), limit of a response (4k to 16k, middle 8k), the engine's share of a step "
                "(0.43 to 1.6 ms, middle 0.55)",
            )
        )
        simulated = step_speedup(plain_s, step_s - plain_s, faster)
        rows.append(
            ranged(
                f"nemo_8b_{name}_step",
                step_faster,
                simulated,
                [],
                known=True,
                matters="known: plain seconds of generation and of the rest, and the rollout's published speed-up",
            )
        )
    return rows


def step_speedup(rollout_s: float, rest_s: float, faster: float) -> float:
    """What a faster rollout makes of a step whose parts take turns."""
    return (rollout_s + rest_s) / (rollout_s / faster + rest_s)


def rows_235b() -> list[Row]:
    """The four projected figures, and the two with asynchrony."""
    rows: list[Row] = []
    found: dict[int, dict[_Case, float]] = {}
    for levels, (length, faster, step_faster) in PROJECTED.items():
        central = _projected(levels, length, gpus=1024, layout=LAYOUTS[0], lengths=LENGTHS[1], ideal=False)
        grid = itertools.product((512, 2048), LAYOUTS, (LENGTHS[0], LENGTHS[2]), (False, True))
        others: dict[_Case, float] = {
            case: _projected(levels, length, gpus=case[0], layout=case[1], lengths=case[2], ideal=case[3])
            for case in grid
        }
        found[levels] = others
        rows.append(
            ranged(
                f"nemo_235b_k{levels}_rollout",
                faster,
                central,
                list(others.values()),
                matters="known: model, GB200, fp8, k, acceptance length, 4,096 samples a step. Not known: GPUs (512 to "
                "2,048, middle 1,024), an instance (4 or 8 GPUs that split matrices, 32 that split experts; middle 8), "
                "lengths (all of 8k to a long tail up to 32k, middle one up to 16k), starts of kernels, the "
                "engine's share and how acceptance spreads over samples (none to our defaults, the middle)",
            )
        )
        [(_, their_rollout, their_step)] = [PROJECTED[other] for other in PROJECTED if other != levels]
        share = share_of(their_rollout, their_step)
        rows.append(
            ranged(
                f"nemo_235b_k{levels}_step",
                step_faster,
                bound(share, faster),
                [],
                known=True,
                matters=f"known: the rollout's published speed-up; its share of the step, {share:.3f}, is taken from "
                "the other projection's pair",
            )
        )
    rows += _asynchronous(found)
    return rows


def share_of(rollout_speedup: float, step_speedup: float) -> float:
    """Share of rollout in a step with which the bound's formula gives this pair."""
    return (1.0 - 1.0 / step_speedup) / (1.0 - 1.0 / rollout_speedup)


def _asynchronous(found: Mapping[int, Mapping[_Case, float]]) -> list[Row]:
    at_2048 = [value for others in found.values() for case, value in others.items() if case[0] == 2048]
    rollout, step = ASYNCHRONOUS
    middle = sum(at_2048) / len(at_2048)
    least = min(share_of(faster, step_faster) for _, faster, step_faster in PROJECTED.values())
    # pools split so that neither waits: generation and training are both always busy
    steps = [bound(share, value) for share in (least, 0.98) for value in at_2048]
    known = "known: model, GB200, fp8, 2,048 GPUs, 4,096 samples. Not known: k and acceptance length (both projections)"
    return [
        ranged(
            "nemo_235b_async_rollout",
            rollout,
            middle,
            at_2048,
            matters=f"{known}, and as above; middle: the mean",
        ),
        ranged(
            "nemo_235b_async_step",
            step,
            bound((least + 0.98) / 2, middle),
            steps,
            matters=f"{known}, the pools' sizes (taken as balanced), the rollout's share of the work "
            f"({least:.2f}, the projections' own, to 0.98: with more GPUs an instance has fewer samples; the middle)",
        ),
    ]


def _projected(
    levels: int, length: float, *, gpus: int, layout: tuple[str, int], lengths: tuple[str, int], ideal: bool
) -> float:
    device: dict[str, Any] = {"name": "GB200"}
    drafter: dict[str, Any] = {"policy": "fixed", "depth": levels, "acceptance_length": length}
    drawn: dict[str, Any] = {"samples": 4096, "draw": lengths[0], "max_new_tokens": lengths[1]}
    if ideal:
        drawn |= {"speed_sigma": 0.0}
        device |= {"layer_s": 0.0, "collective_s": 0.0}
        drafter |= {"step_s": 0.0}
    return rollout_speedup(
        {
            "model": {"dimensions": QWEN3_235B, "precision": "fp8"},
            "device": device,
            "pools": {
                "instances": gpus // layout[1],
                "split": layout[0],
                "tensor_parallel": layout[1],
                "trainer_gpus": gpus,
                "colocated": True,
            },
            "lengths": drawn,
            "drafter": drafter,
            "reallocation": {"policy": "static"},
        }
    )
