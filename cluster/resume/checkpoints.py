"""Published weights as plain Hugging Face checkpoints: which a run writes and keeps, and how.

The loop's process writes them, from the same chunks that the instances load: the run folder is on its machine, and what
is saved is what was sampled from. A folder appears by one rename, with a manifest of checksums
(`core.checkpoint_manifest`).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from transformers import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...actors.remote.waiting import get
from ...core.checkpoint_manifest import write_manifest
from ...core.files import remove_folder, whole_folder
from ...engine.drafters.head.head_weights import save_head
from ...engine.drafters.head.published_head import is_head, is_mtp, published_head
from ...engine.weights.chunks import load_into, weight_views
from ...engine.weights.generation_settings import ending_at
from ...engine.weights.loading import build_causal_lm
from ...learning.training.finished_model import write_adapter_folder, write_model_folder
from ...learning.training.reloaded import Said
from ..folder.layout import RunDir
from ..system.system import System
from ..weights.publish import PublishedWeights

_MODELS = ("target", "draft", "adapter")
_ALWAYS_COMPARED_BYTES = 256 << 20
"Of weights, up to which every checkpoint, not the last alone, is compared with what the trainer says: a second each."


def save_checkpoints(
    system: System, run_dir: RunDir, *, iteration: int | None = None, with_adapter: bool = True
) -> None:
    """Save the trained target and the drafter as Hugging Face checkpoints (a head under EAGLE-3's names).

    An MTP layer is not written: it is as it was read.

    An adapter stands beside its merged target.

    The adapter needs the trainers, which may be gone, and so does what the last target is compared with.

    Numbered ones beyond `run.keep_checkpoints` go, the oldest first. Raises WeightsError, NotAsLearned, StorageError,
    RunTaken.
    """
    run_dir.owner.require()
    if system.config.trainer.lora is not None and with_adapter:
        # first: a merged model that is refused takes nothing with it
        _save_adapter(system, run_dir, "adapter", iteration)
    is_compared = iteration is None or system.target.manifest.num_bytes < _ALWAYS_COMPARED_BYTES
    said = system.trainers.say() if with_adapter and is_compared else None
    for model, weights in (("target", system.target), ("draft", system.draft)):
        if weights is not None and not is_mtp(weights.manifest):
            _save(system, run_dir, weights, model, iteration, said if model == "target" else None)
    if system.config.run.keep_checkpoints is not None:
        remove_old(run_dir, keep=system.config.run.keep_checkpoints)


def kept_models(system: System, run_dir: RunDir) -> dict[str, str]:
    """Return where the last target and what drafts for it stand, by the model's name in the config."""
    models, kept = system.config.models, {"target": str(run_dir.checkpoint_dir("target"))}
    if system.draft is not None:
        is_own = not is_mtp(system.draft.manifest)
        kept["draft"] = str(run_dir.checkpoint_dir("draft")) if is_own else models.draft or models.target
    return kept


def save_best(system: System, run_dir: RunDir) -> None:
    """Save the target, and its adapter, in the place of the best before. Raises WeightsError, StorageError."""
    if system.config.trainer.lora is not None:
        _save_adapter(system, run_dir, "best_adapter")
    _save(system, run_dir, system.target, "best")


def remove_old(run_dir: RunDir, *, keep: int) -> None:
    """Delete numbered checkpoints but the newest `keep` of each model. Raises StorageError."""
    folder = run_dir.path / "checkpoints"
    for model in _MODELS:
        numbered = [path for path in folder.iterdir() if re.fullmatch(rf"{model}_\d+", path.name)]
        for old in sorted(numbered, key=lambda path: int(path.name.rpartition("_")[2]))[:-keep]:
            remove_folder(old)


def _save(
    system: System,
    run_dir: RunDir,
    weights: PublishedWeights,
    name: str,
    iteration: int | None = None,
    said: Said | None = None,
) -> None:
    models, folder = system.config.models, run_dir.checkpoint_dir(name, iteration)
    timeout_s, ends = system.config.cluster.order_timeout_s, system.config.sampling.end_token_ids or ()
    if is_head(weights.manifest):
        save_head_checkpoint(weights, folder, timeout_s=timeout_s)
        return
    source = models.draft if name == "draft" else models.target
    save_checkpoint(
        weights,
        system.tokenizer,
        folder,
        dtype=models.dtype,
        timeout_s=timeout_s,
        generation=None if source is None else ending_at(source, ends),
        said=said,
    )


def _save_adapter(system: System, run_dir: RunDir, name: str, iteration: int | None = None) -> None:
    merged = system.target.manifest
    write_adapter_folder(
        system.trainers.adapter_files(),
        run_dir.checkpoint_dir(name, iteration),
        weight_version=merged.weight_version,
        merged_checksum=merged.checksum,
    )


def save_checkpoint(
    weights: PublishedWeights,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: str,
    timeout_s: float,
    generation: GenerationConfig | None = None,
    said: Said | None = None,
) -> None:
    """Save model and tokenizer as `folder`, whole or not at all; an earlier one stays until then.

    `generation` is the generation_config.json that the model came with.
    Raises WeightsError when a chunk does not match, NotAsLearned, StorageError when the disk is full.
    """
    if said is not None and said.weight_version != weights.manifest.weight_version:
        said = None
    chunks = _chunks(weights, timeout_s)
    model = build_causal_lm(weights.manifest.hf_config_json, dtype)
    load_into(model, weight_views(weights.manifest, chunks), copied=False)
    write_model_folder(
        model,
        tokenizer,
        folder,
        name=weights.manifest.model,
        weight_version=weights.manifest.weight_version,
        checksum=weights.manifest.checksum,
        generation=generation,
        said=said,
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
