"""What each operation of the CPU back end is worth: whole generations with it and with torch in its place.

Contestants decode the same requests, in turn, on one thread: the whole back end, the back end without one operation,
and torch alone. Where an operation is built on others (a whole forward on products and attention), it goes with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.harness import Bench
from benchmarks.support.timing import engine_rate, interleaved, ratios
from benchmarks.support.workload import PLAIN, demo_workload, model_p
from rlhfspec.core.config import SpeculationConfig
from rlhfspec.engine.attention.backends import ordered_attention
from rlhfspec.engine.cpu.backend import CpuBackend
from rlhfspec.engine.cpu.noise_on_demand import CpuNoiseSource
from rlhfspec.engine.cpu.tokens import CpuNoise
from rlhfspec.engine.decoding.noise import Noise, NoiseSource
from rlhfspec.engine.model.compute_backend import ComputeBackend

CPU = torch.device("cpu")
ROUNDS = {"quick": 2, "default": 6, "full": 12}
BATCH_SIZES = (1, 8)
CHAIN = SpeculationConfig(policy="fixed", num_nodes=4)


class WithoutChain(CpuBackend):
    """A chain's levels are drafted by a forward and a choice each."""

    def chain(self, *_: Any, **__: Any) -> None:
        """See `ComputeBackend.chain`."""
        return None


class WithoutForward(CpuBackend):
    """Layers run call by call; products and attention stay our own."""

    def fuse(self, *_: Any, **__: Any) -> None:
        """See `ComputeBackend.fuse`."""
        return None


class WithoutAttention(WithoutForward):
    """Attention by torch, over unpacked rows."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.attention = ordered_attention


class WithoutProducts(WithoutForward):
    """Products by oneDNN or a plain matrix, as torch has them."""

    linear = ComputeBackend.linear
    widens_bfloat16 = False


class ChosenByTorch(CpuNoiseSource):
    """Noise of our own, and choices by torch."""

    def __call__(self, words: np.ndarray, positions: np.ndarray, vocab_size: int) -> Noise:
        """See `NoiseSource`."""
        return Noise(super().__call__(words, positions, vocab_size).values)


class NoiseByTorch(NoiseSource):
    """Noise by torch, and choices of our own."""

    def __call__(self, words: np.ndarray, positions: np.ndarray, vocab_size: int) -> Noise:
        """See `NoiseSource`."""
        return CpuNoise(super().__call__(words, positions, vocab_size).values)


def _with_noise(source: type[NoiseSource]) -> ComputeBackend:
    backend = CpuBackend(CPU)
    backend.noise = source(CPU)
    return backend


BACKENDS: Mapping[str, Callable[[], ComputeBackend]] = {
    "all": partial(CpuBackend, CPU),
    "chain": partial(WithoutChain, CPU),
    "forward": partial(WithoutForward, CPU),
    "attention": partial(WithoutAttention, CPU),
    "products": partial(WithoutProducts, CPU),
    "noise": partial(_with_noise, NoiseByTorch),
    "choices": partial(_with_noise, ChosenByTorch),
    "everything": partial(ComputeBackend, CPU),
}
"By what torch does instead."


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark; returns 0."""
    bench = Bench("ablation", out=out, mode=mode)
    figures, rounds = bench.figures, ROUNDS[mode]
    workload = demo_workload(16)
    for batch_size in BATCH_SIZES:
        demo = replace(workload, prompts=workload.prompts[: 2 * batch_size + 2])
        for pair, decoded in {"demo": demo, "p": model_p(batch_size)}.items():
            plan, draft = (CHAIN, demo.draft("float32")) if pair == "demo" else (PLAIN, None)
            rates = {}
            for name, backend in BACKENDS.items():
                engine = decoded.engine(
                    plan,
                    draft,
                    max_total_tokens=workload.max_total_tokens if pair == "demo" else None,
                    parts={"backend": backend()},
                    device="cpu",
                    max_running_samples=batch_size,
                    probe=False,
                )
                # processor time: other processes do not count
                rates[name] = engine_rate(engine, decoded.requests(), time.thread_time)
            taken = interleaved(rates, rounds)
            for name in BACKENDS:
                if name != "all":
                    figure = f"without_{name}_{pair}_b{batch_size}"
                    figures.keep(figure, ratios(taken, "all", name))
                    bench.console.print(f"{figure}: {figures.values[figure]:.3f} {figures.intervals[figure]}")
    bench.write(rounds=rounds)
    return 0
