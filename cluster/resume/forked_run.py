"""A new run that goes on from a state of another with changed keys (`rlhfspec fork`); that one is only read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.checkpoint_manifest import state_folders, state_number
from ...core.config import Config
from ...core.config_io import load_config
from ...core.errors import ConfigError
from ...core.files import whole_folder, write_whole
from ..folder.absolute_paths import with_absolute_paths
from ..folder.layout import RunDir
from ..folder.run_time import of_folder
from .changed_keys import changed_samples
from .resumed_run import ResumedRun
from .rewind import rewind
from .run_state import RunState, read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedRun(ResumedRun):
    """What a fork begins with: `run_dir` is its own folder, not there yet, `state` still the other run's."""

    def begin(self, config_text: str, note: Callable[[str], None]) -> RunDir:
        """Make the folder, with the state as its first and the other run's record up to it.

        Raises StorageError, ConfigError: no folder can be made.
        """
        state, run_dir = self.state, RunDir.create(self.config, self.run_dir.path)
        write_whole(run_dir.config_file, config_text)
        with whole_folder(state.within(run_dir).folder) as partial:
            shutil.copytree(state.folder, partial, dirs_exist_ok=True)
            write_whole(partial / state.config_file.name, config_text)
            tree = json.loads((partial / "state.json").read_text())
            # of its own reward, and there is no copy of what was best
            tree["evaluations"] = {**tree.get("evaluations", {}), "best": None, "metric": None}
            write_whole(partial / "state.json", json.dumps(tree))
            replace(state, folder=partial).seal()
        # puts the lines of the record back that the state keeps: all, here
        rewind(run_dir, state.within(run_dir), lambda line: None)
        return run_dir


def open_fork(folder: Path, at: int, settings: Sequence[str]) -> tuple[Config, RunState | None]:
    """The config of a fork of a run after `at` iterations, and the state it goes on from; of 0 none. Writes nothing.

    Raises ConfigError: no run, no such state, a change that makes other samples of the same keys; ModelError: the state
    is damaged.
    """
    run_dir = RunDir.open(folder)
    before, config = (
        of_folder(with_absolute_paths(load_config(run_dir.config_file, changes), Path.cwd()), run_dir.path)
        for changes in ((), [f"rollout.record={json.dumps(str(run_dir.path))}", *settings])
    )
    if changes := changed_samples(before, config):
        raise ConfigError(
            f"a fork keeps the run's keys and prompts, and this changes them: {'; '.join(changes)}; leave it out, or "
            "begin a new run (--config)"
        )
    if before.algorithm.kind != config.algorithm.kind:
        raise ConfigError(
            f"a fork keeps algorithm.kind {before.algorithm.kind}, got {config.algorithm.kind}: the config of a run "
            "spells out what follows from its kind; begin a new run of its record (train --config FILE --rollouts RUN)"
        )
    if at == 0:
        return config, None
    kept = {state_number(state): state for state in state_folders(run_dir.checkpoints_folder)}
    if at not in kept:
        raise ConfigError(
            f"{run_dir.path} keeps no state after iteration {at}: expected --at "
            f"{', '.join(map(str, [0, *sorted(kept)]))}, got {at}; run.state_every and run.keep_states keep more"
        )
    if at >= config.run.iterations:
        raise ConfigError(
            f"nothing is left to do after iteration {at} of {config.run.iterations}; raise run.iterations by --set, or "
            "fork earlier"
        )
    held = [(c.algorithm.has_critic, c.algorithm.kl_coef > 0, c.trainer.lora) for c in (before, config)]
    if held[0] != held[1]:
        raise ConfigError(
            "the state's trainers hold (critic, reference, trainer.lora) "
            f"{held[0]}, this config asks for {held[1]}; fork --at 0, or keep algorithm.kind, kl_coef > 0 and lora"
        )
    return config, read_state(kept[at])
