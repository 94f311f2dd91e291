"""What memory that comes with a sample's length is worth: long-tailed responses through the same bytes of cache.

Three engines on model P, plain: `reserved` has slots at full length, as many as the bytes hold; `paged` has eight times
the slots, and its samples share the bytes; `unlimited` has those slots and memory for all of them at full length.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.support.timing import Figures, engine_rate, interleaved, plain_engine, ratios
from benchmarks.support.workload import VOCAB_SIZE, model_p_folder, model_p_requests
from rlhfspec.core.records import SampleRequest
from rlhfspec.engine.engine import Engine

RESERVED_SLOTS, PAGED_SLOTS = 4, 32
LONGEST, USUAL, SPREAD = 900, 70, 1.0
"New tokens: drawn from a lognormal distribution of this median and sigma, cut at the longest."
PROMPT_TOKENS, NUM_SAMPLES = 32, 64
MB = 10**6


def paging(cache_dir: Path, figures: Figures, rounds: int) -> None:
    """Keep `paged_over_reserved`, `paged_over_unlimited` and `paged_preemptions`, the last of one rollout."""
    folder, requests = model_p_folder(cache_dir), _long_tailed()

    def engine(slots: int, limit_mb: float | None = None) -> Engine:
        return plain_engine(
            folder,
            "float32",
            batch_size=slots,
            max_total_tokens=PROMPT_TOKENS + LONGEST,
            vocab_size=VOCAB_SIZE,
            kv_cache_mb=limit_mb,
        )

    reserved = engine(RESERVED_SLOTS)
    paged = engine(PAGED_SLOTS, reserved.runner.pool.num_bytes / MB)
    engines = {"reserved": reserved, "paged": paged, "unlimited": engine(PAGED_SLOTS)}
    taken = interleaved({name: engine_rate(each, requests) for name, each in engines.items()}, rounds)
    figures.keep("paged_over_reserved", ratios(taken, "paged", "reserved"))
    figures.keep("paged_over_unlimited", ratios(taken, "paged", "unlimited"))
    figures.values["paged_preemptions"] = paged.stats.num_preemptions / (1 + 2 * rounds)


def _long_tailed() -> list[SampleRequest]:
    requests = model_p_requests(NUM_SAMPLES, prompt_tokens=PROMPT_TOKENS)
    random = np.random.default_rng(7)
    lengths = np.minimum(random.lognormal(np.log(USUAL), SPREAD, NUM_SAMPLES).astype(int) + 1, LONGEST)
    return [
        replace(request, sampling=replace(request.sampling, max_new_tokens=int(length)))
        for request, length in zip(requests, lengths, strict=True)
    ]
