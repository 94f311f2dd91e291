"""Opens a run that was cut off: its config, its last whole state; a run that still lives is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.resuming.rewind import rewind
from cluster.resuming.run_state import RunState, last_state
from cluster.run_folder.layout import RunDir
from cluster.run_folder.run_status import describe_status
from core.config import Config
from core.config_io import dump_config, load_config
from core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRun:
    """What a run is gone on with."""

    config: Config
    run_dir: RunDir
    state: RunState

    def begin(self, config: Config) -> RunDir:
        """Take the folder back to the state and call it running. Raises StorageError."""
        rewind(self.run_dir, num_iterations=self.state.num_iterations)
        dump_config(config, self.run_dir.config_file)
        self.run_dir.set_status("running")
        return self.run_dir


def open_run(folder: str, settings: Sequence[str], note: Callable[[str], None]) -> ResumedRun:
    """Read a run's folder; `settings` are changes to its config. Nothing is written.

    Raises ConfigError: no run, one that is running, one without a whole state, one that is finished.
    """
    run_dir = RunDir.open(folder)
    told = describe_status(run_dir.status())
    if told[0].startswith("state running") or "exists but gives no sign" in told[0]:
        raise ConfigError(f"{run_dir.path} is not cut off: {told[0]}; stop it first")
    config = load_config(str(run_dir.config_file), settings)
    state = last_state(run_dir, note)
    if state.num_iterations >= config.run.iterations:
        raise ConfigError(
            f"{run_dir.path} has a state after {state.num_iterations} iterations, and run.iterations is "
            f"{config.run.iterations}: nothing is left to do; raise it with --set run.iterations=..."
        )
    note(
        f"run folder {run_dir.path}, resumed after iteration {state.num_iterations} of {config.run.iterations}"
    )
    return ResumedRun(config=config, run_dir=run_dir, state=state)
