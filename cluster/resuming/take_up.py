"""Puts a system that was brought up with its first weights where a state was taken."""

from __future__ import annotations

from cluster.resuming.run_state import RunState
from cluster.system import System
from core.errors import StorageError


def take_up(system: System, state: RunState) -> None:
    """Put trainers, instances and cursor where the state was taken.

    Trainers begin with the first weights all the same: an adapter's base and a reference are made of them.
    Raises ConfigError, DataError: the config is not that of the state; StorageError: other weights come of it.
    """
    system.trainers.load_state(state.trainer_folder)
    system.cursor.restore(state.cursor)
    system.target = system.trainers.take()
    found = system.target.manifest
    if (found.weight_version, found.checksum) != (state.weight_version, state.parameter_checksum):
        raise StorageError(
            f"state {state.folder}: expected weight version {state.weight_version} with checksum "
            f"{state.parameter_checksum}, got version {found.weight_version} with {found.checksum}; models.target, "
            "models.dtype or the adapter are not those of the run, or the file has changed: resume with its own config"
        )
    system.generation.publish(system.target)


