"""Which checkpoints a run writes and keeps: numbered ones, the last, the best."""

from __future__ import annotations

import re
import shutil

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.resume.checkpoints import save_adapter, save_checkpoint, save_head_checkpoint
from rlhfspec.cluster.system.system import System
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.files import PARTIAL, storage_errors
from rlhfspec.engine.drafters.head.published_head import is_head, is_mtp
from rlhfspec.engine.weights.generation_settings import ending_at

_MODELS = ("target", "draft", "adapter")


def save_checkpoints(
    system: System, run_dir: RunDir, *, iteration: int | None = None, with_adapter: bool = True
) -> None:
    """Save the trained target and the drafter as Hugging Face checkpoints (a head under EAGLE-3's names).

    An MTP layer is not written: it is as it was read.

    An adapter stands beside its merged target.

    The adapter alone needs the trainers, which may be gone.

    Numbered ones beyond `run.keep_checkpoints` go, the oldest first. Raises WeightsError, StorageError, RunTaken.
    """
    run_dir.owner.require()
    for model, weights in (("target", system.target), ("draft", system.draft)):
        if weights is not None and not is_mtp(weights.manifest):
            _save(system, run_dir, weights, model, iteration)
    if system.config.trainer.lora is not None and with_adapter:
        _save_adapter(system, run_dir, "adapter", iteration)
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
    _save(system, run_dir, system.target, "best")
    if system.config.trainer.lora is not None:
        _save_adapter(system, run_dir, "best_adapter")


def remove_old(run_dir: RunDir, *, keep: int) -> None:
    """Delete numbered checkpoints but the newest `keep` of each model. Raises StorageError."""
    folder = run_dir.path / "checkpoints"
    for model in _MODELS:
        numbered = [path for path in folder.iterdir() if re.fullmatch(rf"{model}_\d+", path.name)]
        for old in sorted(numbered, key=lambda path: int(path.name.rpartition("_")[2]))[:-keep]:
            # whoever is killed in between leaves what a later run removes, and no half checkpoint
            doomed = old.with_name(PARTIAL + old.name)
            with storage_errors(old):
                shutil.rmtree(doomed, ignore_errors=True)
                old.rename(doomed)
                shutil.rmtree(doomed)


def _save(
    system: System, run_dir: RunDir, weights: PublishedWeights, name: str, iteration: int | None = None
) -> None:
    models, timeout_s = system.config.models, system.config.cluster.order_timeout_s
    if is_head(weights.manifest):
        save_head_checkpoint(weights, run_dir.checkpoint_dir(name, iteration), timeout_s=timeout_s)
        return
    source = models.draft if name == "draft" else models.target
    save_checkpoint(
        weights,
        system.tokenizer,
        run_dir.checkpoint_dir(name, iteration),
        dtype=system.config.models.dtype,
        timeout_s=timeout_s,
        generation=ending_at(source, system.config.sampling.end_token_ids or ())
        if source is not None
        else None,
    )


def _save_adapter(system: System, run_dir: RunDir, name: str, iteration: int | None = None) -> None:
    save_adapter(
        system.trainers.adapter_files(),
        run_dir.checkpoint_dir(name, iteration),
        merged=system.target.manifest,
    )
