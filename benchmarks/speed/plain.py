"""Plain decoding of model P beside Hugging Face `generate` and the peers that are built (B = 1, 8, 32)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.client import Peer, available_peers
from benchmarks.support.timing import (
    Figures,
    Rate,
    engine_rate,
    hugging_face_rate,
    interleaved,
    plain_engine,
    ratios,
)
from benchmarks.support.workload import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    VOCAB_SIZE,
    model_p_folder,
    model_p_requests,
)
from rlhfspec.core.records import SampleRequest
from rlhfspec.engine.weights.loading import load_causal_lm

BATCH_SIZES = (1, 8, 32)
BFLOAT16_BATCH_SIZE = 8


def plain_decoding(
    cache_dir: Path, figures: Figures, rounds: int, console: Console, batch_sizes: Sequence[int] = BATCH_SIZES
) -> list[dict[str, Any]]:
    """Keep `plain_over_hf_b*`, `plain_over_PEER_b*` and `bf16_over_hf_fp32_b8`; return rates as rows."""
    folder = model_p_folder(cache_dir)
    rows = []
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(
                Peer(name, folder, max_batch=max(batch_sizes), max_total_tokens=PROMPT_TOKENS + NEW_TOKENS)
            )
            for name in available_peers(cache_dir / "peers")
        }
        for batch_size in batch_sizes:
            requests = model_p_requests(batch_size)
            contestants = {"ours": _our_rate(folder, requests, "float32")}
            contestants["hf"] = hugging_face_rate(
                load_causal_lm(str(folder), "float32"), requests, batch_size=batch_size, pad_token_id=0
            )
            if batch_size == BFLOAT16_BATCH_SIZE:
                contestants["ours bfloat16"] = _our_rate(folder, requests, "bfloat16")
            contestants |= {name: _peer_rate(peer, requests) for name, peer in peers.items()}
            taken = interleaved(contestants, rounds)
            for name in ("hf", *peers):
                figure = f"plain_over_{name}_b{batch_size}"
                figures.keep(figure, ratios(taken, "ours", name))
                console.print(f"{figure}: {figures.values[figure]:.2f}")
            if "ours bfloat16" in taken:
                figures.keep("bf16_over_hf_fp32_b8", ratios(taken, "ours bfloat16", "hf"))
            rows += [
                {"part": "plain", "contestant": name, "batch_size": batch_size, "tokens_per_s": value}
                for name, values in taken.items()
                for value in values
            ]
    return rows


def _our_rate(folder: Path, requests: Sequence[SampleRequest], dtype: str) -> Rate:
    engine = plain_engine(
        folder,
        dtype,
        batch_size=len(requests),
        max_total_tokens=PROMPT_TOKENS + NEW_TOKENS,
        vocab_size=VOCAB_SIZE,
    )
    return engine_rate(engine, requests)


def _peer_rate(peer: Peer, requests: Sequence[SampleRequest]) -> Rate:
    prompts = [request.prompt.token_ids.tolist() for request in requests]

    def rate() -> float:
        result = peer.generate(prompts, max_new_tokens=NEW_TOKENS, temperature=0.0)
        return result.num_tokens / result.seconds

    return rate
