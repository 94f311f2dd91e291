"""Writes the state of a run (`cluster.resume.run_state`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.resume.checkpoints import save_head_checkpoint
from rlhfspec.cluster.resume.kept_record import keep_record
from rlhfspec.cluster.resume.run_state import SCHEMA_VERSION, WITHOUT_UNSCORED, EvaluationMarks, RunState
from rlhfspec.cluster.run.in_flight_files import write_in_flight
from rlhfspec.cluster.run.pipeline import InFlight
from rlhfspec.cluster.system.system import System
from rlhfspec.core.checkpoint_manifest import has_manifest, state_folders, write_manifest
from rlhfspec.core.config_io import dump_config
from rlhfspec.core.files import PARTIAL, storage_errors, whole_folder
from rlhfspec.engine.drafters.head.published_head import is_head


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where a run stands between two iterations."""

    num_iterations: int
    "that are finished"
    cursor: dict[str, int | str]
    evaluations: EvaluationMarks
    in_flight: InFlight = field(default_factory=InFlight)
    "empty where generation does not run ahead"


class StateKeeper:
    """Writes the states of one run, every `run.state_every` iterations, and lets old ones go."""

    def __init__(self, system: System, run_dir: RunDir, note: Callable[[str], None]) -> None:
        self._system, self._run_dir, self._note = system, run_dir, note
        self._every, self._keep = system.config.run.state_every, system.config.run.keep_states
        self._is_blind = False

    def at(self, boundary: Boundary) -> None:
        """Write the state where one is due. Raises StorageError, and what trainers raise that are gone."""
        if self._every and boundary.num_iterations and boundary.num_iterations % self._every == 0:
            self.save(boundary)

    def save(self, boundary: Boundary) -> RunState | None:
        """Write the state of a boundary that the trainers have not gone beyond; None where they do not see the folder.

        One that stands already is left alone: its folder became visible when it was whole.
        The folder appears by one rename, each file synced and with its checksum; older ones go then.
        Raises StorageError, RunTaken, and what trainers raise that are gone.
        """
        if self._is_blind or not self._every:
            return None
        self._run_dir.owner.require()
        system = self._system
        target, draft = system.target.manifest, system.draft
        state = RunState(
            folder=self._run_dir.checkpoint_dir("state", boundary.num_iterations),
            num_iterations=boundary.num_iterations,
            weight_version=target.weight_version,
            parameter_checksum=target.checksum,
            draft_version=None if draft is None else draft.manifest.weight_version,
            draft_checksum=None if draft is None else draft.manifest.checksum,
            cursor=boundary.cursor,
            evaluations=boundary.evaluations,
        )
        if has_manifest(state.folder):
            return state
        blind = system.trainers.blind_to(self._run_dir.path)
        if blind:
            self._is_blind = True
            self._note(
                f"no state of this run is kept: {', '.join(blind)} runs on a machine that does not see "
                f"{self._run_dir.path}; set run.output_dir to a folder that all machines share, and it can be resumed"
            )
            return None
        with whole_folder(state.folder) as partial:
            system.trainers.save_state(replace(state, folder=partial).trainer_folder)
            if draft is not None and is_head(draft.manifest):
                timeout_s = system.config.cluster.order_timeout_s
                save_head_checkpoint(draft, replace(state, folder=partial).head_folder, timeout_s=timeout_s)
            if boundary.in_flight.ready:
                write_in_flight(replace(state, folder=partial).in_flight_folder, boundary.in_flight)
            keep_record(
                self._run_dir,
                partial,
                num_iterations=state.num_iterations,
                weight_version=state.weight_version,
            )
            dump_config(system.config, replace(state, folder=partial).config_file)
            (partial / "state.json").write_text(
                json.dumps(state_tree(state, boundary.in_flight), indent=2) + "\n"
            )
            write_manifest(
                partial,
                model="state",
                weight_version=state.weight_version,
                parameter_checksum=state.parameter_checksum,
            )
        for old in state_folders(self._run_dir.checkpoints_folder)[self._keep :]:
            _remove(old)
        return state


def state_tree(state: RunState, in_flight: InFlight) -> dict[str, Any]:
    """What `state.json` says of a state with these samples."""
    tree = asdict(state)
    del tree["folder"]
    return {"schema_version": SCHEMA_VERSION if in_flight.unscored else WITHOUT_UNSCORED} | tree


def _remove(folder: Path) -> None:
    # whoever is killed in between leaves what a later run removes, and no half state
    doomed = folder.with_name(PARTIAL + folder.name)
    with storage_errors(folder):
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
