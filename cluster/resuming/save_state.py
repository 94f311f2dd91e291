"""Writes the state of a run (`cluster.resuming.run_state`)."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster.resuming.run_state import SCHEMA_VERSION, EvaluationMarks, RunState, state_folders
from cluster.run_folder.layout import RunDir
from cluster.system import System
from cluster.weights.checkpoints import save_checkpoint
from core.checkpoint_manifest import write_manifest
from core.errors import StorageError
from core.files import PARTIAL, storage_errors, whole_folder


def save_state(
    system: System,
    run_dir: RunDir,
    *,
    num_iterations: int,
    evaluations: EvaluationMarks,
    cursor: dict[str, int | str] | None = None,
) -> RunState:
    """Write the state after so many iterations; older ones beyond `run.keep_checkpoints`, at least one, go.

    `cursor` is the prompt cursor's state where it has gone on already. Raises StorageError, also where a trainer
    writes to a disk that is not the driver's; InstanceLost and the like when a trainer is gone.
    """
    manifest = system.target.manifest
    state = RunState(
        folder=run_dir.checkpoint_dir("state", num_iterations),
        num_iterations=num_iterations,
        weight_version=manifest.weight_version,
        parameter_checksum=manifest.checksum,
        draft_version=None if system.draft is None else system.draft.manifest.weight_version,
        cursor=cursor or system.cursor.state(),
        evaluations=evaluations,
    )
    with whole_folder(state.folder) as partial:
        there = replace(state, folder=partial)
        system.trainers.save_state(there.trainer_folder)
        if not there.trainer_folder.is_dir():
            raise StorageError(
                f"the trainers have written {there.trainer_folder}, and the driver does not see it; set run.output_dir "
                "to a folder that every node sees, or run.checkpoint_every: 0"
            )
        if system.draft is not None:
            save_checkpoint(
                system.draft,
                system.tokenizer,
                there.draft_folder,
                dtype=system.config.models.dtype,
                timeout_s=system.config.cluster.order_timeout_s,
            )
        (partial / "state.json").write_text(json.dumps(_as_tree(state), indent=2) + "\n")
        write_manifest(
            partial,
            model="state",
            weight_version=state.weight_version,
            parameter_checksum=state.parameter_checksum,
        )
    keep = system.config.run.keep_checkpoints or 1
    for old in state_folders(run_dir)[keep:]:
        _remove(old)
    return state


def _as_tree(state: RunState) -> dict[str, Any]:
    tree = asdict(state)
    del tree["folder"]
    return {"schema_version": SCHEMA_VERSION} | tree


def _remove(folder: Path) -> None:
    # whoever is killed in between leaves what a later run removes, and no half state
    doomed = folder.with_name(PARTIAL + folder.name)
    with storage_errors(folder):
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
