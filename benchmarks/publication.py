"""Publication at real size: from the trainer to two running instances, and what a second start takes.

Model: SmolLM2-135M-Instruct (0.54 GB of float32). `--full` adds random models of up to 3 GB: seconds must be linear in
bytes. Ratios are over one warm `numpy.copyto` of as many bytes, taken right before each publication.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..actors.actor_messages import GenerationSpec, TrainerSpec
from ..actors.generation.generation_actor import GenerationActor
from ..actors.workers.trainer_actor import TrainerActor
from ..cluster.observe.console import PipeConsole
from ..cluster.ray_start import machine
from ..cluster.ray_start.ray_session import ray_session
from ..cluster.system.trainer_pool import TrainerPool
from ..cluster.system.weight_broadcast import Broadcast
from ..cluster.weights.publish import Fetching, PublishedWeights, publish
from ..core.awake import looking
from ..core.config import (
    AlgorithmConfig,
    ClusterConfig,
    EngineConfig,
    SpeculationConfig,
    TrainerConfig,
)
from ..core.errors import RlhfSpecError
from ..core.settings.cluster import PublicationConfig
from ..engine.weights.chunks import pack_weights
from ..engine.weights.loading import load_causal_lm
from .support.actor_pool import ask
from .support.harness import Bench
from .support.processes import descendants
from .support.starting import seconds
from .support.timing import Figures
from .support.workload import real_model

TIMEOUT_S = 300.0
WARM_COPIES = 5
SAMPLE_S = 0.005
"Between two looks at memory."


@dataclass(frozen=True, slots=True, kw_only=True)
class Publications:
    """Of one model, rounds side by side."""

    num_bytes: int
    seconds: list[float]
    "from the order to pack until every instance has confirmed"
    over_memcpy: list[float]
    "over one warm `numpy.copyto` of as many bytes, taken right before"
    extra_models: list[float]
    "peak of all processes' own memory and the object store over what was there before, in models"


def measure(folder: Path, *, rounds: int, broadcast: bool = False) -> Publications:
    """Publish a model `rounds` times to two running instances, after one time to warm up. Ray must be running."""
    with _running(folder) as (trainer, instances, weights):
        num_bytes = weights.manifest.num_bytes
        cluster = ClusterConfig(publication=PublicationConfig(transport="broadcast"))
        group = Broadcast(cluster, TrainerPool({"trainer": trainer}, cluster), print) if broadcast else None
        source, copy = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        seconds, ratios, extra = [], [], []
        for number in range(1 + rounds):
            memcpy_s = min(_timed_copy(copy, source) for _ in range(WARM_COPIES))
            with _peak_memory() as peak:
                began_s = time.perf_counter()
                if group is None:
                    weights = Fetching(trainer, timeout_s=TIMEOUT_S).wait()
                    publish(weights, instances, timeout_s=TIMEOUT_S)
                elif group.publish(weights, 0, instances) is None:
                    raise RlhfSpecError("the broadcast did not serve; the line before says why")
                took_s = time.perf_counter() - began_s
            extra.append(peak.bytes / num_bytes)
            if number:
                seconds.append(took_s)
                ratios.append(took_s / memcpy_s)
    return Publications(num_bytes=num_bytes, seconds=seconds, over_memcpy=ratios, extra_models=extra)


@contextmanager
def _running(folder: Path) -> Iterator[tuple[Any, dict[str, Any], PublishedWeights]]:
    engine = EngineConfig(max_running_samples=8, probe=False)
    speculation = SpeculationConfig(drafter="none", policy="off")
    names = ("gen-0", "gen-1")
    manifest, chunks = pack_weights(load_causal_lm(str(folder), "float32"), name="target", weight_version=0)
    weights = PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))
    vocab_size = manifest.tensors[0].shape[0]
    del chunks
    trainer = TrainerActor.options(num_cpus=0.5).remote(
        TrainerSpec(
            algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0),
            trainer=TrainerConfig(),
            drafter_training=None,
            dtype="float32",
            temperature=1.0,
            seed=0,
            pad_token_id=0,
            vocab_size=vocab_size,
        )
    )
    instances: dict[str, Any] = {
        name: GenerationActor.options(num_cpus=0.5).remote(
            GenerationSpec(
                instance=name,
                engine=engine,
                speculation=speculation,
                dtype="float32",
                max_total_tokens=256,
                vocab_size=vocab_size,
                report_interval_s=0.1,
            )
        )
        for name in names
    }
    loops = [handle.run.remote() for handle in instances.values()]
    try:
        ask(trainer.load_weights.remote(manifest, *weights.chunk_refs), "load the first weights")
        publish(weights, instances, timeout_s=TIMEOUT_S)
        yield trainer, instances, weights
    finally:
        for handle in (trainer, *instances.values()):
            ray.kill(handle)
        del loops


def _timed_copy(into: np.ndarray, source: np.ndarray) -> float:
    began_s = time.perf_counter()
    np.copyto(into, source)
    return time.perf_counter() - began_s


class _Peak:
    bytes = 0


@contextmanager
def _peak_memory() -> Iterator[_Peak]:
    """Watch this process and all below it, and shared memory; Linux."""
    peak = _Peak()
    statuses = [Path(f"/proc/{pid}/status") for pid in (os.getpid(), *descendants(os.getpid()))]
    before = _used(statuses)

    def look() -> None:
        peak.bytes = max(peak.bytes, _used(statuses) - before)

    with looking(look, SAMPLE_S):
        yield peak


def _used(statuses: list[Path]) -> int:
    total = 0
    for path in statuses:
        try:
            text = path.read_text()
        except OSError:
            continue
        at = text.find("RssAnon:")
        total += int(text[at + 8 :].split(None, 1)[0]) << 10 if at >= 0 else 0
    shared = os.statvfs("/dev/shm")
    return total + (shared.f_blocks - shared.f_bfree) * shared.f_frsize


ROUNDS = {"quick": 3, "default": 10, "full": 20}
RANDOM_LAYERS = {"0.75 GB": 13, "1.5 GB": 28, "3 GB": 58}
"Of 12.6M parameters each, beside a vocabulary of 16,384."
PROCESSES = 8
"Models that trainer, two instances with their copies, the store and this process hold at most."


def run(bench: Bench) -> int:
    """Run the benchmark; always returns 0."""
    console, figures = bench.console, bench.figures
    target = real_model(console)
    if target is None:
        return 0
    rounds = ROUNDS[bench.mode]
    published = _measure(target, rounds, num_bytes=600_000_000)
    figures.keep("publish_s_real", published.seconds)
    figures.keep("publish_over_memcpy_real", published.over_memcpy)
    figures.values["publish_extra_models_real"] = max(published.extra_models)
    broadcast = _measure(target, rounds, num_bytes=600_000_000, broadcast=True)
    figures.keep("broadcast_s_real", broadcast.seconds)
    figures.keep("broadcast_over_memcpy_real", broadcast.over_memcpy)
    figures.values["broadcast_extra_models_real"] = max(broadcast.extra_models)
    console.print(figures.values)
    if not bench.is_quick:
        _starts(target, figures)
    if bench.is_full:
        _linearity(rounds, figures, console)
    console.print(f"written {bench.write()}")
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
