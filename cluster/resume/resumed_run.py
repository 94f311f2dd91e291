"""Opens a run that was cut off: its config, its last whole state; a run that still lives is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...core.checkpoint_manifest import state_folders
from ...core.config import Config
from ...core.config_io import load_config
from ...core.errors import ConfigError, DataError, describe_error
from ...core.files import write_whole
from ...learning.data.cursor import PromptCursor
from ...learning.data.prompts import PromptDataset
from ..folder.absolute_paths import with_absolute_paths
from ..folder.layout import RunDir, of_run
from ..folder.run_status import STALE_AFTER_S, describe_status, may_be_running, was_heard_of
from ..folder.run_time import folder_time, of_folder, with_time
from .changed_keys import deciding_changes, own_config, require_kept
from .rewind import rewind
from .run_state import RunState, last_state

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRun:
    """What a run is gone on with."""

    config: Config
    run_dir: RunDir
    state: RunState
    is_time_guessed: bool = False
    "run.template_time is of the folder's name, as the run kept none"

    def require_same_data(self, dataset: PromptDataset) -> None:
        """Raise DataError where the prompts are not those that the run has learned from."""
        config = self.config
        cursor = PromptCursor(dataset, run_seed=config.run.seed, shuffle=config.data.shuffle)
        try:
            cursor.restore(self.state.cursor)
        except DataError as error:
            if not self.is_time_guessed:
                raise
            raise DataError(
                f"{error}; the run is of an earlier version, which kept no time: where the chat template prints it, "
                f"{config.run.template_time} was taken, and --set run.template_time=... gives another"
            ) from error

    def begin(self, config_text: str, note: Callable[[str], None]) -> RunDir:
        """Take the folder back to the state and call it running, by the config that is resolved by now.

        `note` is told of what was lost or put back.

        Raises StorageError, ConfigError: it runs again.
        """
        take_over(self.run_dir)
        try:
            rewind(self.run_dir, self.state, note)
            write_whole(self.run_dir.config_file, config_text)
        except Exception as error:
            self.run_dir.set_status("failed", describe_error(error))
            raise
        return self.run_dir


def open_run(folder: str | Path, settings: Sequence[str], note: Callable[[str], None]) -> ResumedRun:
    """Read a run's folder; `settings` are changes to its config. Nothing is written.

    Raises ConfigError: no run, one that is running, one without a whole state, one that is finished, or a change that
    decides about its result.
    """
    run_dir = RunDir.open(folder)
    before = own_config(run_dir)
    config = with_absolute_paths(load_config(run_dir.config_file, settings), Path.cwd())
    is_time_guessed = config.run.template_time is None
    config = of_folder(config, run_dir.path)
    # of an earlier version: nothing says that this time is another than the run had
    before = with_time(before, config.run.template_time)
    changes = deciding_changes(before, config)
    if changes:
        raise ConfigError(
            f"a resumed run goes on as it would have, and this changes its result: {'; '.join(changes)}; "
            "leave it out, or begin a new run (--config) with models.target at a checkpoint of this one"
        )
    require_cut_off(run_dir)
    state = last_state(run_dir, note)
    if state is None:
        raise ConfigError(
            f"{run_dir.path} cannot be resumed: expected a whole state in checkpoints/, got none; a run keeps one "
            "every run.state_every iterations; start it anew with --config, and another --out"
        )
    require_kept(before, run_dir.config_file, state.config_file)
    if _is_done(run_dir, config.run.iterations):
        raise ConfigError(
            f"{run_dir.path} is finished, after {before.run.iterations} iterations: nothing is left to do; go on with "
            "--set run.iterations=..."
        )
    resumed = ResumedRun(config=config, run_dir=run_dir, state=state, is_time_guessed=is_time_guessed)
    return _noted(resumed, note)


def newest_run(config: Config, base: Path, note: Callable[[str], None]) -> ResumedRun | None:
    """What `--resume auto` goes on with: of the runs of this name in `base`, the newest that has this config.

    None where that one is finished or has no state, or there is none: a new one is to begin. A run of another machine
    that calls itself running is waited for until it was silent for long enough.
    Raises ConfigError when it goes on running.
    """
    asked = config
    for folder in _runs_of(base, asked.run.name):
        run_dir = RunDir(path=folder)
        try:
            run_dir.require_files()
            own = _kept_config(run_dir) or own_config(run_dir)
            is_time_guessed = own.run.template_time is None
            own = with_time(own, asked.run.template_time or folder_time(folder))
            # a run goes on with what it began with
            config = with_time(asked, own.run.template_time)
            if config.sampling.end_token_ids is None:
                config = config.ending_at(own.sampling.end_token_ids)
            if changes := deciding_changes(own, config):
                raise ConfigError("; ".join(changes))
        except ConfigError as error:
            note(f"--resume auto passes over {folder}: {error}")
            continue
        if _is_done(run_dir, config.run.iterations):
            note(f"--resume auto: {folder} is finished; a new run begins")
            return None
        _wait_until_silent(run_dir, note)
        state = last_state(run_dir, note)
        if state is None:
            note(f"--resume auto: {folder} has no state to go on from; a new run begins")
            return None
        resumed = ResumedRun(config=config, run_dir=run_dir, state=state, is_time_guessed=is_time_guessed)
        return _noted(resumed, note)
    return None


def _kept_config(run_dir: RunDir) -> Config | None:
    """What the newest state has of it, which nobody edits; None where there is none that can be read."""
    for folder in state_folders(run_dir.checkpoints_folder)[:1]:
        with suppress(ConfigError):
            return with_absolute_paths(load_config(folder / run_dir.config_file.name), Path.cwd())
    return None


def _is_done(run_dir: RunDir, iterations: int) -> bool:
    """Whether a run has ended well, and no more than it has done is asked for."""
    is_finished = run_dir.status()["state"] == "finished"
    return is_finished and own_config(run_dir).run.iterations >= iterations


def take_over(run_dir: RunDir) -> None:
    """Make the folder of a run that is cut off this process's own, and call it running.

    Raises ConfigError where it runs, or another process takes it at this moment, StorageError.
    """
    last = run_dir.owner.last()
    require_cut_off(run_dir)
    if not run_dir.owner.claim(after=last):
        raise ConfigError(f"{run_dir.path} was just taken up by another process; look at `rlhfspec show`")
    run_dir.set_status("running")


def require_cut_off(run_dir: RunDir) -> None:
    """Raise ConfigError for a run that may be running."""
    status = run_dir.status()
    if may_be_running(status):
        raise ConfigError(f"{run_dir.path} is not cut off: {describe_status(status)[0]}; stop it first")


def _wait_until_silent(run_dir: RunDir, note: Callable[[str], None]) -> None:
    """A pod that was replaced is not there any more, and its last heartbeat may be seconds old."""
    first = run_dir.status()
    if may_be_running(first):
        note(
            f"{run_dir.path}: {describe_status(first)[0]}; waiting until that one is heard of, or surely gone"
        )
    ends_s = time.monotonic() + STALE_AFTER_S + _LOOK_S
    while may_be_running(status := run_dir.status()) and not was_heard_of(first, status):
        if time.monotonic() > ends_s:
            # of this machine, and stopped
            break
        time.sleep(_LOOK_S)
    require_cut_off(run_dir)


def _runs_of(base: Path, name: str) -> list[Path]:
    """Run folders of a name, the newest first."""
    names = [path.name for path in base.iterdir()] if base.is_dir() else []
    return [base / found for found in of_run(names, name) if (base / found / "config.yaml").is_file()]


def _noted(resumed: ResumedRun, note: Callable[[str], None]) -> ResumedRun:
    done, total = resumed.state.num_iterations, resumed.config.run.iterations
    if done > total:
        raise ConfigError(
            f"{resumed.run_dir.path} has gone {done} iterations already, expected run.iterations of at least that, got "
            f"{total}; raise it, or begin a new run"
        )
    note(f"run folder {resumed.run_dir.path}, resumed after iteration {done} of {total}")
    return resumed
