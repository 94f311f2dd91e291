"""Writes the states of a run (`cluster.resume.run_state`), and puts a system where one was taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...core.checkpoint_manifest import has_manifest, state_folders
from ...core.config_io import dump_config
from ...core.errors import ConfigError, StorageError
from ...core.files import remove_folder, whole_folder
from ...core.weight_records import kind_of
from ...engine.drafters.head.head_weights import load_head
from ...engine.drafters.head.published_head import is_head
from ...policies.staleness.rollout_schedule import InFlight, Schedule
from ..folder.layout import RunDir
from ..system.system import System
from ..weights.first_weights import put_head
from ..weights.publish import PublishedWeights
from .checkpoints import save_head_checkpoint
from .in_flight_files import read_in_flight, write_in_flight
from .rewind import keep_record
from .run_state import SCHEMA_VERSION, WITHOUT_UNSCORED, EvaluationMarks, RunState


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
        tree = json.dumps(state_tree(state, boundary.in_flight), indent=2)
        with whole_folder(state.folder) as partial:
            new = replace(state, folder=partial)
            system.trainers.save_state(new.trainer_folder)
            if draft is not None and is_head(draft.manifest):
                save_head_checkpoint(draft, new.head_folder, timeout_s=system.config.cluster.order_timeout_s)
            if boundary.in_flight.ready:
                write_in_flight(new.in_flight_folder, boundary.in_flight)
            keep_record(self._run_dir, new)
            dump_config(system.config, new.config_file)
            (partial / "state.json").write_text(f"{tree}\n")
            new.seal()
        for old in state_folders(self._run_dir.checkpoints_folder)[self._keep :]:
            remove_folder(old)
        return state


def state_tree(state: RunState, in_flight: InFlight) -> dict[str, Any]:
    """What `state.json` says of a state with these samples."""
    tree = asdict(state)
    del tree["folder"]
    if not state.evaluations.num_not_better:  # which earlier versions of the project do not know
        del tree["evaluations"]["num_not_better"]
    return {"schema_version": SCHEMA_VERSION if in_flight.unscored else WITHOUT_UNSCORED} | tree


def take_up(system: System, state: RunState, schedule: Schedule) -> None:
    """Put trainers, instances, cursor and schedule where the state was taken.

    Trainers begin with the first weights all the same: an adapter's base and a reference are made of them.
    Raises ConfigError, DataError: the config is not that of the state; StorageError: other weights come of it;
    ModelError: its draft head cannot be read.
    """
    blind = system.trainers.blind_to(state.folder)
    if blind:
        raise ConfigError(
            f"cannot resume: {', '.join(blind)} runs on a machine that does not see {state.folder}; expected a folder "
            "that all machines share"
        )
    system.trainers.load_state(state.trainer_folder)
    system.cursor.restore(state.cursor)
    if state.in_flight_folder.is_dir():
        schedule.restore(read_in_flight(state.in_flight_folder, system.cursor.dataset, system.sampling))
    system.target = system.trainers.take(checksums=kind_of(state.parameter_checksum))
    _require(system.target, state, state.weight_version, state.parameter_checksum)
    system.generation.publish(system.target)
    # what drafts may be another than in the state: then it begins as the config names it
    if system.draft is None or not state.draft_version:
        return
    if (has_head := state.head_folder.is_dir()) and is_head(system.draft.manifest):
        head = load_head(state.head_folder, num_target_layers=1)
        system.draft = put_head(head, weight_version=state.draft_version)
    elif not has_head and system.config.refits_draft:
        system.draft = system.trainers.take("draft", checksums=kind_of(state.draft_checksum or ""))
    else:
        return
    _require(system.draft, state, state.draft_version, state.draft_checksum)
    system.generation.publish(system.draft)


def _require(weights: PublishedWeights, state: RunState, version: int, checksum: str | None) -> None:
    found = weights.manifest
    if (found.weight_version, found.checksum) != (version, checksum):
        raise StorageError(
            f"state {state.folder}: expected {found.model} version {version} with checksum {checksum}, got version "
            f"{found.weight_version} with {found.checksum}; the models or the code are not those of the run: resume "
            "with its own"
        )
