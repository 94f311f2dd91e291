"""Writes published weights as a plain Hugging Face checkpoint, tokenizer included.

The loop's process writes it, from the same chunks that the instances load: the run folder is on its
machine, and what is saved is what was sampled from. The folder appears by one rename, with a manifest
of checksums (`core.checkpoint_manifest`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from transformers import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlhfspec.actors.waiting.waiting import get
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.checkpoint_manifest import write_manifest
from rlhfspec.core.files import whole_folder
from rlhfspec.core.weight_records import WeightManifest
from rlhfspec.engine.drafters.head.head_weights import save_head
from rlhfspec.engine.drafters.head.published_head import published_head
from rlhfspec.engine.weights.chunks import load_into, weight_views
from rlhfspec.engine.weights.generation_settings import write_generation_settings
from rlhfspec.engine.weights.loading import build_causal_lm


def save_checkpoint(
    weights: PublishedWeights,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: str,
    timeout_s: float,
    generation: GenerationConfig | None = None,
) -> None:
    """Save model and tokenizer as `folder`, whole or not at all; an earlier one stays until then.

    `generation` is the generation_config.json that the model came with: end tokens stand there that nothing else names.
    Raises WeightsError when a chunk does not match, StorageError when the disk is full.
    """
    chunks = _chunks(weights, timeout_s)
    model = build_causal_lm(weights.manifest.hf_config_json, dtype)
    load_into(model, weight_views(weights.manifest, chunks))
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        write_generation_settings(generation, partial)
        tokenizer.save_pretrained(partial)
        write_manifest(
            partial,
            model=weights.manifest.model,
            weight_version=weights.manifest.weight_version,
            parameter_checksum=weights.manifest.checksum,
        )


def save_head_checkpoint(weights: PublishedWeights, folder: Path, *, timeout_s: float) -> None:
    """Save a draft head as `folder` under EAGLE-3's names, whole or not at all; raises what `save_checkpoint` does."""
    head = published_head(weights.manifest, weight_views(weights.manifest, _chunks(weights, timeout_s)))
    with whole_folder(folder) as partial:
        save_head(partial, head)
        write_manifest(
            partial,
            model="draft",
            weight_version=weights.manifest.weight_version,
            parameter_checksum=weights.manifest.checksum,
        )


def _chunks(weights: PublishedWeights, timeout_s: float) -> list[np.ndarray]:
    return get(
        list(weights.refs()),
        waiter="the loop",
        waited_for="the object store",
        order=f"fetch {weights.manifest.model} version {weights.manifest.weight_version}",
        timeout_s=timeout_s,
    )


def save_adapter(files: Mapping[str, bytes], folder: Path, *, merged: WeightManifest) -> None:
    """Write an adapter's files as `folder`, whole or not at all.

    Args:
        files: name and content of each, as peft wrote them.
        folder: where `peft.PeftModel.from_pretrained` will find them.
        merged: the published weights that the adapter is merged into; its version and checksum are noted.

    Raises:
        StorageError: the disk is full.
    """
    with whole_folder(folder) as partial:
        for name, content in files.items():
            (partial / name).write_bytes(content)
        write_manifest(
            partial, model="adapter", weight_version=merged.weight_version, parameter_checksum=merged.checksum
        )
