"""Publication at real size: from the trainer to two running instances, and what a second start takes.

Model: SmolLM2-135M-Instruct (0.54 GB of float32). `--full` adds random models of up to 3 GB: seconds must be linear in
bytes. Ratios are over one warm `numpy.copyto` of as many bytes, taken right before each publication.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.real.publishing import Publications, measure
from benchmarks.real.starting import seconds
from benchmarks.support.result import write_result
from benchmarks.support.timing import Figures
from benchmarks.support.workload import REAL_MODEL, default_cache_dir, job
from rlhfspec.cluster.observe.console import PipeConsole
from rlhfspec.cluster.placement import machine
from rlhfspec.cluster.placement.ray_session import ray_session
from rlhfspec.core.config import (
    ClusterConfig,
)
from rlhfspec.core.errors import ModelError
from rlhfspec.learning.models.get import get_model

ROUNDS = {"quick": 3, "default": 10, "full": 20}
RANDOM_LAYERS = {"0.75 GB": 13, "1.5 GB": 28, "3 GB": 58}
"Of 12.6M parameters each, beside a vocabulary of 16,384."
PROCESSES = 8
"Models that trainer, two instances with their copies, the store and this process hold at most."


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark; always returns 0. `data` is not used."""
    torch.set_num_threads(1)
    console, figures = PipeConsole(), Figures()
    try:
        with job(f"getting {REAL_MODEL}") as tick:
            target = get_model(REAL_MODEL, default_cache_dir(), progress=tick).path
    except ModelError as error:
        console.print(f"skipped: {error}", markup=False)
        return 0
    rounds = ROUNDS[mode]
    published = _measure(target, rounds, num_bytes=600_000_000)
    figures.keep("publish_s_real", published.seconds)
    figures.keep("publish_over_memcpy_real", published.over_memcpy)
    figures.values["publish_extra_models_real"] = max(published.extra_models)
    broadcast = _measure(target, rounds, num_bytes=600_000_000, broadcast=True)
    figures.keep("broadcast_s_real", broadcast.seconds)
    figures.keep("broadcast_over_memcpy_real", broadcast.over_memcpy)
    figures.values["broadcast_extra_models_real"] = max(broadcast.extra_models)
    console.print(figures.values)
    if mode != "quick":
        _starts(target, figures)
    if mode == "full":
        _linearity(rounds, figures, console)
    path = write_result(out, "publication", figures.values, figures.intervals, {"mode": mode})
    console.print(figures.values)
    console.print(f"written {path}")
    return 0


def _measure(folder: Path, rounds: int, *, num_bytes: int, broadcast: bool = False) -> Publications:
    cluster = ClusterConfig(dashboard=False)
    with ray_session(cluster, "bench-publication", store_bytes=2 * num_bytes + (256 << 20)):
        return measure(folder, rounds=rounds, broadcast=broadcast)


def _starts(target: Path, figures: Figures) -> None:
    """The first start keeps the probe's verdict; the second is what is told."""
    with tempfile.TemporaryDirectory() as cache:
        figures.values["first_start_s_real"] = seconds("run", target, Path(cache))
        bare_s = seconds("bare", target, Path(cache))
        second_s = seconds("run", target, Path(cache))
    figures.values["bare_start_s"] = bare_s
    figures.values["second_start_s_real"] = second_s
    figures.values["start_s_real"] = second_s - bare_s


def _linearity(rounds: int, figures: Figures, console: PipeConsole) -> None:
    for label, layers in RANDOM_LAYERS.items():
        config = LlamaConfig(
            vocab_size=16_384,
            hidden_size=1024,
            intermediate_size=2_816,
            num_hidden_layers=layers,
            num_attention_heads=16,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
        )
        with torch.device("meta"):
            num_bytes = 4 * sum(weight.numel() for weight in LlamaForCausalLM(config).parameters())
        if num_bytes * PROCESSES > (machine.memory_bytes() or 0):
            console.print(f"{label} left out: it needs {num_bytes * PROCESSES / 1e9:.0f} GB of memory")
            continue
        with tempfile.TemporaryDirectory() as folder:
            LlamaForCausalLM(config).save_pretrained(folder)
            published = _measure(Path(folder), rounds, num_bytes=num_bytes)
        name = label.replace(" ", "").replace(".", "_").lower()
        figures.keep(f"publish_s_per_gb_{name}", [s / num_bytes * 1e9 for s in published.seconds])
        figures.values[f"publish_extra_models_{name}"] = max(published.extra_models)
