"""Plain decoding beside Hugging Face and the peers that are built: rates, and shares of the memory's bandwidth.

All decode greedily, to one length, on as many threads. On two, ours are two engines of half the batch each, as two
generation actors are: of one sample the second thread has none. A step reads every weight once, and the caches of its
samples: these bytes a second, over what a copy of arrays beyond any cache reads and writes in the same rounds, are an
engine's share. The prompts' forwards take time and are not counted among the bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ...engine.numerics import on_threads
from ..peers.client import Peer, available_peers
from ..support.timing import Figures, Rate, hugging_face_rate, interleaved, rate_rows, ratios
from ..support.workload import Workload

BF16 = "_bf16"
"Behind the name of an engine whose weights are bfloat16."
BF16_PEERS = ("llama_cpp",)
"The others need a processor with instructions for it."
BF16_CACHES = tuple(name + BF16 for name in BF16_PEERS)
"Of 16 bits: ours stay float32."
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
"The largest cache's size, such as 32768K."
COPIED_BYTES = 1 << 28
"By a thread: several times the largest cache."


def plain_decoding(
    workloads: Mapping[int, Workload],
    figures: Figures,
    rounds: int,
    console: Console,
    *,
    threads: int = 1,
    suffix: str = "",
) -> list[dict[str, Any]]:
    """Compare the engines on the workload of each batch size; return rates as rows.

    Keeps, batch size and suffix behind each: `plain_over_X` of every other engine, `bf16_over_X` of those whose weights
    are bfloat16 too, `bf16_over_hf_fp32`, `share_X` of every engine, and `copied_gb_per_s`; once `weights_over_cache`.
    """
    rows = []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1)))
        peers = _peers(workloads[max(workloads)], max(workloads), threads)
        peers = {name: stack.enter_context(peer) for name, peer in peers.items()}
        weights, cells = _numbers_read(workloads[max(workloads)])
        if CACHE.is_file():
            figures.values[f"weights_over_cache{suffix}"] = 4 * weights / (int(CACHE.read_text()[:-2]) << 10)
        for size, workload in workloads.items():
            engines = {
                "ours": _our_rate(workload, pool, threads, "float32"),
                f"ours{BF16}": _our_rate(workload, pool, threads, "bfloat16"),
                "hf": their_rate(workload, threads),
                **{name: peer_rate(peer, workload) for name, peer in peers.items()},
            }
            taken = interleaved({**engines, "copy": _copy_rate(pool, threads)}, rounds)
            pairs = {f"plain_over_{name}": ("ours", name) for name in ("hf", *peers) if BF16 not in name}
            pairs |= {
                f"bf16_over_{name}": (f"ours{BF16}", name + BF16) for name in peers if name + BF16 in peers
            }
            pairs["bf16_over_hf_fp32"] = (f"ours{BF16}", "hf")
            end = f"_b{size}{f'_t{threads}' * (threads > 1)}{suffix}"
            for figure, (a, b) in pairs.items():
                kept = figures.keep(figure + end, ratios(taken, a, b))
                console.print(f"{figure}{end}: {kept:.2f}")
            for name in engines:
                read = weights * (2 if name.endswith(BF16) else 4) / size
                read += cells * (2 if name in BF16_CACHES else 4) * _mean_context(workload)
                kept = figures.keep(f"share_{name}{end}", [read * x for x in ratios(taken, name, "copy")])
                console.print(f"share_{name}{end}: {kept:.2f}")
            figures.values[f"copied_gb_per_s{end}"] = statistics.median(taken.pop("copy")) / 1e9
            rows += rate_rows(taken, part="plain", batch_size=size, threads=threads)
    return rows


def greedy(workload: Workload, size: int) -> Workload:
    """The first prompts, every response as long as may be: what all engines can be asked for."""
    sampling = replace(workload.sampling, temperature=0.0, stop_token_ids=())
    return replace(workload, prompts=workload.prompts[:size], sampling=sampling)


def _peers(workload: Workload, max_batch: int, threads: int) -> dict[str, Peer]:
    """Every peer that is built; those that can a second time with bfloat16 weights."""
    built = available_peers()
    kinds = {name: (name, "float32") for name in built}
    kinds |= {name + BF16: (name, "bfloat16") for name in BF16_PEERS if name in built}
    return {
        key: Peer(
            name,
            workload.paths.target,
            max_batch=max_batch,
            max_total_tokens=workload.max_total_tokens,
            dtype=dtype,
            threads=threads,
        )
        for key, (name, dtype) in kinds.items()
    }


def peer_rate(peer: Peer, workload: Workload) -> Rate:
    """Tokens a second of all prompts at once, to the greatest length."""
    prompts = [prompt.token_ids.tolist() for prompt in workload.prompts]
    sampling = workload.sampling

    def rate() -> float:
        result = peer.generate(prompts, sampling.max_new_tokens, sampling.temperature)
        return result.num_tokens / result.seconds

    return rate


def _our_rate(workload: Workload, pool: ThreadPoolExecutor, threads: int, dtype: str) -> Rate:
    """Of an engine a thread, each with its share of the prompts."""
    share = -(-len(workload.prompts) // threads)
    lots = [
        replace(workload, prompts=workload.prompts[first : first + share])
        for first in range(0, len(workload.prompts), share)
    ]
    engines = [lot.engine(max_running_samples=share, dtype=dtype) for lot in lots]
    requests = [lot.requests() for lot in lots]

    def rate() -> float:
        started = time.perf_counter()
        done = list(pool.map(lambda engine, own: engine.generate(own), engines, requests))
        seconds = time.perf_counter() - started
        return sum(len(completion.token_ids) for own in done for completion in own) / seconds

    return rate


def their_rate(workload: Workload, threads: int = 1) -> Rate:
    """Of Hugging Face `generate`, all prompts in one batch."""
    generate = hugging_face_rate(
        workload.target("float32"),
        workload.requests(),
        batch_size=len(workload.prompts),
        pad_token_id=workload.pad_token_id,
    )

    def rate() -> float:
        with on_threads(threads):
            return generate()

    return rate


def _copy_rate(pool: ThreadPoolExecutor, threads: int) -> Rate:
    """Bytes read and written a second."""
    arrays = [np.ones((2, COPIED_BYTES // 8), dtype=np.float32) for _ in range(threads)]

    def rate() -> float:
        started = time.perf_counter()
        list(pool.map(lambda array: np.copyto(array[1], array[0]), arrays))
        return sum(array.nbytes for array in arrays) / (time.perf_counter() - started)

    return rate


def _numbers_read(workload: Workload) -> tuple[int, int]:
    """Weights that a step reads, without embeddings that are looked up; of a token's caches."""
    model = workload.target("float32")
    config = model.config
    weights = sum(weight.numel() for weight in model.parameters())
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    return weights, 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def _mean_context(workload: Workload) -> float:
    """Tokens in a sample's cache, halfway through its response."""
    prompt = statistics.fmean(len(prompt.token_ids) for prompt in workload.prompts)
    return prompt + workload.sampling.max_new_tokens / 2
