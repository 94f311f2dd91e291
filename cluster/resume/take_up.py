"""Puts a system that was brought up with its first weights where a state was taken."""

from __future__ import annotations

from rlhfspec.cluster.resume.run_state import RunState
from rlhfspec.cluster.run.in_flight_files import read_in_flight
from rlhfspec.cluster.run.pipeline import Pipeline
from rlhfspec.cluster.system.system import System
from rlhfspec.cluster.weights.first_weights import put_head
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.errors import ConfigError, StorageError
from rlhfspec.core.weight_records import kind_of
from rlhfspec.engine.drafters.head.head_weights import load_head
from rlhfspec.engine.drafters.head.published_head import is_head


def take_up(system: System, state: RunState, pipeline: Pipeline | None = None) -> None:
    """Put trainers, instances and cursor where the state was taken.

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
    if pipeline is not None:
        pipeline.restore(read_in_flight(state.in_flight_folder, system.cursor.dataset, system.sampling))
    system.target = system.trainers.take(checksums=kind_of(state.parameter_checksum))
    _require(system.target, state, state.weight_version, state.parameter_checksum)
    system.generation.publish(system.target)
    # what drafts may be another than in the state: then it begins as the config names it
    has_head = state.head_folder.is_dir()
    if system.draft is not None and system.config.refits_draft and state.draft_version and not has_head:
        system.draft = system.trainers.take("draft", checksums=kind_of(state.draft_checksum or ""))
        _require(system.draft, state, state.draft_version, state.draft_checksum)
        system.generation.publish(system.draft)
    if system.draft is not None and is_head(system.draft.manifest) and state.draft_version and has_head:
        head = load_head(state.head_folder, num_target_layers=1)
        system.draft = put_head(head, weight_version=state.draft_version)
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
