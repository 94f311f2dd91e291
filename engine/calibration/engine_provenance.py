"""What runs here, in the terms of `profiles.provenance`."""

from __future__ import annotations

import platform
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...core.config import EngineConfig
from ...core.records import SamplingParams
from ...profiles.provenance import Provenance
from ..cache.kv_pool import KVShape
from ..drafters.head.head_weights import HeadWeights
from ..drafters.head.published_head import head_checksum
from ..model.llama_model import LlamaModel
from ..numerics import choose_backend, kernels_for, resolve_device, resolve_numerics
from ..weights.causal_lm import CausalLM
from ..weights.chunks import model_checksum

ENGINE_CODE = "one node a sample timed first"
"To be renamed when steps take, or are measured to take, another time than before: profiles are then measured anew."
NO_DRAFT = "none: drafts are looked up"
_RECORDED = ("transformers", "numpy", "statsmodels")

Drafts = CausalLM | HeadWeights | None
"A draft model, a head; None: drafts are looked up."


def provenance_of(
    target: CausalLM,
    draft: Drafts,
    *,
    engine: EngineConfig,
    dtype: str,
    sampling: SamplingParams,
    max_total_tokens: int,
    num_ranks: int = 1,
) -> Provenance:
    """Describe a pair, or a target whose drafts are looked up, on this machine as a profile would."""
    facts = _instance_facts(target, draft, engine, dtype)
    facts["num_ranks"] = num_ranks
    return Provenance(
        **facts,
        target_weights=NO_DRAFT if draft is None else _checksum(target),
        draft_weights=_checksum(draft),
        sampling=f"T={sampling.temperature:g} top_k={sampling.top_k} top_p={sampling.top_p:g}"
        + (f" min_p={sampling.min_p:g}" if sampling.min_p else ""),
        max_total_tokens=max_total_tokens,
        versions=", ".join(f"{package} {metadata.version(package)}" for package in _RECORDED),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def here(
    measured: Provenance,
    target: CausalLM,
    draft: Drafts,
    *,
    engine: EngineConfig,
    dtype: str,
) -> Provenance:
    """Describe an instance, which knows hardware and models; the rest is the run's and taken as measured."""
    return replace(measured, **_instance_facts(target, draft, engine, dtype))


def _instance_facts(target: CausalLM, draft: Drafts, engine: EngineConfig, dtype: str) -> dict[str, Any]:
    """What an instance knows by itself: hardware, numerics, architectures, slots."""
    device = resolve_device(engine.device)
    numerics = resolve_numerics(engine, device)
    ranks = target.ranks if isinstance(target, LlamaModel) else None
    backend = choose_backend(device, num_threads=engine.num_threads, kernels=kernels_for(engine, numerics))
    return {
        "device": device_name(device),
        "num_threads": engine.num_threads,
        "num_ranks": 1 if ranks is None else ranks.share.ranks,
        "dtype": dtype,
        "numerics": numerics,
        "target_model": _architecture(target),
        "draft_model": _architecture(draft),
        "num_slots": engine.max_running_samples,
        "kv_cache": "full lengths" if engine.kv_cache_mb is None else f"{engine.kv_cache_mb:g} MB",
        "torch_version": torch.__version__,
        "engine_code": ENGINE_CODE if backend.name == "cpu" else f"{ENGINE_CODE}, by {backend.name}",
    }


def device_name(device: torch.device) -> str:
    """Name the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _checksum(draft: Drafts) -> str:
    if draft is None:
        return NO_DRAFT
    if isinstance(draft, LlamaModel):
        return draft.checksum
    return head_checksum(draft) if isinstance(draft, HeadWeights) else model_checksum(draft)


def _architecture(model: Drafts) -> str:
    """Everything that decides a model's cost, readable."""
    if model is None:
        return NO_DRAFT
    if isinstance(model, HeadWeights):
        size = model.config
        taps = ", ".join(map(str, size.tapped_layers))
        what = "MTP layer on the last one's output" if size.takes_output else f"head on layers {taps}"
        return (
            f"{what}, {size.num_heads} heads over "
            f"{size.num_kv_heads} of {size.head_size}, {model.num_trained} parameters, {size.draft_vocab_size} ids"
        )
    shape = KVShape.of(model.config)
    return (
        f"{model.config.model_type}, {shape.num_layers} layers, {shape.num_heads} heads over {shape.num_kv_heads} "
        f"of {shape.head_size}, {model.num_parameters()} parameters"
    )
