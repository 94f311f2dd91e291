"""The run folder: one absolute place for everything a run leaves behind.

    RUN/config.yaml                     the resolved config, every default spelled out
    RUN/status.json                     state, why, heartbeat; always 4096 bytes, filled up with spaces
    RUN/owners/0001.json                the process that began the run, then each that resumed it
    RUN/live.json                       what the run is doing now, for `rlhfspec status`; replaced every two seconds
    RUN/logs/ACTOR.jsonl                structured log of each process; at most 16 MB each
    RUN/metrics.jsonl                   one object an iteration (`core.metrics`)
    RUN/rollouts/iteration_0000.parquet prompts, responses, rewards, log-probabilities
    RUN/histograms.jsonl                one object an iteration: lengths, rewards, advantages
    RUN/samples/iteration-00000.md      a few samples for people to read, where tracking.samples is above 0
    RUN/tensorboard/, RUN/wandb/        of the trackers that `tracking` asks for
    RUN/evaluations.jsonl               one object an evaluation, where evaluation.every is set
    RUN/evaluations/                    the evaluated samples of each, columns as in rollouts/
    RUN/weights.jsonl                   the parameter checksum of every version of the target
    RUN/moves.jsonl                     one object for each move of a sample; no file where none moved
    RUN/steps/INSTANCE/                 a step log, one Parquet file an iteration, where run.step_log is true
    RUN/checkpoints/{target,draft}/     Hugging Face checkpoints, tokenizer included
    RUN/checkpoints/adapter/            a PEFT adapter, where trainer.lora is set
    RUN/checkpoints/state_0010/         all that `rlhfspec train --resume` goes on from after 10 iterations
    RUN/checkpoints/best/               the target at its best evaluation; best_adapter/ likewise
    RUN/timeline.json                   what the instances did in the last iteration, as a trace
    RUN/traces/iteration_0000.json.gz   the trace of each of the last 100 iterations, for `rlhfspec trace`
    RUN/remote_copy.json                what the copy at run.copy_to has, where that is set
    RUN/summary.txt                     written at the end, after an interruption too
    RUN/comparison.json                 the last batch beside the same one decoded plainly (`rlhfspec compare`)

A job's working directory (Ray unpacks it under its own temporary folder and deletes it) is never
used: results would vanish with it. Names that begin with `.partial-` are of what is being written.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path

from ...core.checkpoint_manifest import state_folders, state_number
from ...core.config import Config, RunConfig
from ...core.config_io import dump_config
from ...core.errors import ConfigError, StorageError
from ...core.outside import is_file, try_folder
from ...core.settings.supervised import SupervisedConfig
from .owner import Owner
from .run_status import Status, StatusWriter, read_status

JOB_RUNS_FOLDER = "~/rlhfspec-runs"
"Where runs go when the caller's folder is a Ray job's temporary working directory."

KEPT_TRACES = 100
"Iterations: what the run folder holds of them stays bounded."

_RAY_WORKING_DIR_MARK = "runtime_resources"


def is_ray_working_dir(folder: Path) -> bool:
    """True for a folder that Ray made for a job (`.../session_x/runtime_resources/...`)."""
    return _RAY_WORKING_DIR_MARK in folder.parts


def run_base(run: RunConfig, *, caller_dir: Path) -> Path:
    """Where run folders are made, absolute."""
    base = Path(run.output_dir).expanduser()
    if base.is_absolute():
        return base
    return Path(JOB_RUNS_FOLDER).expanduser() if is_ray_working_dir(caller_dir) else caller_dir / base


def choose_run_path(run: RunConfig, *, caller_dir: Path, now: datetime, out: Path | None = None) -> Path:
    """Return the absolute path of a run folder that does not exist yet. Nothing is left there.

    `out` names the run folder itself; an empty one that stands there makes way. Raises ConfigError when it
    is taken, when the place is one that Ray will delete, or no folder can be made there.
    """
    base, named = (
        (run_base(run, caller_dir=caller_dir), "run.output_dir")
        if out is None
        else (caller_dir / out, "--out")
    )
    if is_ray_working_dir(base):
        raise ConfigError(
            f"{named} must outlive the job, got {base}, which Ray deletes with the job; "
            f"set {named} to a folder outside Ray's temporary one"
        )
    if out is not None:
        return _free_folder(base)
    try:
        try_folder(base)
    except OSError as error:
        raise _no_run_folder(base, error) from None
    path = base / f"{run.name}-{now:%Y%m%d-%H%M%S}"
    return next(path for path in _with_numbers(path) if not path.exists())


def _free_folder(out: Path) -> Path:
    if out.is_dir() and not any(out.iterdir()):
        with suppress(OSError):
            out.rmdir()
    if out.exists():
        goes_on = any(out.glob("checkpoints/state_*"))
        other = (
            f"go on with it by --resume {out}"
            if goes_on
            else "delete this one, which keeps no state to go on with"
        )
        raise ConfigError(f"--out {out} is there already; expected a new folder: name another, or {other}")
    return out


def of_run(names: Iterable[str], run_name: str) -> list[str]:
    """Those of folders' names that runs of this name have, the newest first."""
    form = re.compile(rf"{re.escape(run_name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    matches = [match for name in names if (match := form.fullmatch(name))]
    return [match[0] for match in sorted(matches, key=lambda m: (m[1], int(m[2] or 1)), reverse=True)]


def _with_numbers(path: Path) -> Iterator[Path]:
    """Yield `path`, then `path-2`, `path-3` ..."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def _make_own_folder(path: Path) -> Path:
    """Make `path`, or the first of its numbered names that is free; mkdir decides between two runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = _with_numbers(path)
    while True:
        own = next(numbered)
        try:
            own.mkdir()
        except FileExistsError:
            continue
        return own


def _no_run_folder(base: Path, error: OSError) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space there, or set run.output_dir to a larger disk"
    else:
        advice = "set run.output_dir to a folder you may write to"
    return ConfigError(f"cannot make a run folder in {base}: {error.strerror}; {advice}")


class _Below:
    """A file or folder of a run, by the name that the module's docstring explains."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: RunDir, _: type) -> Path:
        return run_dir.path / self._name


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """Names every file of a run folder."""

    path: Path
    owner: Owner = field(init=False, repr=False, compare=False)
    "to be asked before anything is written (`Owner.require`)"
    _writer: StatusWriter = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", Owner(self.path))
        writer = StatusWriter(self.status_file, may_write=lambda: not self.owner.is_taken)
        object.__setattr__(self, "_writer", writer)

    @classmethod
    def create(
        cls,
        config: Config | SupervisedConfig,
        path: Path | None = None,
        *,
        folders: Sequence[str] = ("rollouts", "checkpoints"),
    ) -> RunDir:
        """Make the folder, write the resolved config and the status `running`.

        A folder of its own even when another run took `path` since it was chosen: the next number then.
        Raises ConfigError when the folder cannot be made; nothing is left of it.
        """
        settings = RunConfig(name=config.run.name, output_dir=config.run.output_dir)
        path = path or choose_run_path(settings, caller_dir=Path.cwd(), now=datetime.now())
        try:
            path = _make_own_folder(path)
        except OSError as error:
            raise _no_run_folder(path.parent, error) from error
        run_dir = cls(path=path)
        try:
            for name in folders:
                (path / name).mkdir()
            dump_config(config, run_dir.config_file)
            run_dir.owner.claim(after=0)
            run_dir._writer.reserve()
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise _no_run_folder(path.parent, error) from error
        except StorageError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise ConfigError(f"cannot begin the run: {error}") from error
        return run_dir

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Open the folder of an earlier run. Raises ConfigError when it is none, or holds a folder for a file."""
        path = Path(path)
        # a name that the system refuses is no run folder either
        with suppress(OSError, RuntimeError, ValueError):
            path = path.expanduser().resolve()
        around = next((above.parent for above in (path, *path.parents) if above.name == "checkpoints"), None)
        if around is not None and is_file(around / "config.yaml"):  # a state has one too
            raise ConfigError(f"{path} is a part of a run; expected the run's own folder: give {around}")
        if not is_file(path / "config.yaml"):
            raise ConfigError(
                f"{path} is not a run folder: expected config.yaml in it, found none; "
                "give the folder that the run printed first and makes once config, models and data are checked"
            )
        run_dir = cls(path=path)
        run_dir.require_files()
        return run_dir

    def require_files(self) -> None:
        """Raise ConfigError where a folder stands in the place of one of the run's files."""
        for file in (
            self.status_file,
            self.live_file,
            self.metrics_file,
            self.histograms_file,
            self.evaluations_file,
            self.weights_file,
            self.moves_file,
        ):
            if file.is_dir():
                raise ConfigError(
                    f"{file} is a folder: expected a file of the run, or nothing; move it out of the run folder"
                )

    config_file = _Below("config.yaml")
    status_file = _Below("status.json")
    live_file = _Below("live.json")
    logs_folder = _Below("logs")
    metrics_file = _Below("metrics.jsonl")
    histograms_file = _Below("histograms.jsonl")
    evaluations_file = _Below("evaluations.jsonl")
    weights_file = _Below("weights.jsonl")
    moves_file = _Below("moves.jsonl")
    timeline_file = _Below("timeline.json")
    summary_file = _Below("summary.txt")
    comparison_file = _Below("comparison.json")
    checkpoints_folder = _Below("checkpoints")

    def rollouts_file(self, iteration: int) -> Path:
        """Parquet file of one iteration's rollouts; iterations count from 0."""
        return self.path / "rollouts" / f"iteration_{iteration:04d}.parquet"

    def trace_file(self, iteration: int) -> Path:
        """The trace of one of the last iterations, by gzip."""
        return self.path / "traces" / f"iteration_{iteration:04d}.json.gz"

    def samples_file(self, iteration: int) -> Path:
        """Markdown of a few samples of one iteration."""
        return self.path / "samples" / f"iteration-{iteration:05d}.md"

    def evaluated_file(self, num_iterations: int) -> Path:
        """Parquet file of the samples that were evaluated after so many iterations."""
        return self.path / "evaluations" / f"evaluation_{num_iterations:04d}.parquet"

    def steps_file(self, instance: str, iteration: int) -> Path:
        """Parquet file of what one instance's decode steps did in one iteration."""
        return self.path / "steps" / instance / f"iteration_{iteration:04d}.parquet"

    def checkpoint_dir(self, model: str, iteration: int | None = None) -> Path:
        """Folder of a checkpoint of `target`, `draft`, `adapter`, `best`; the last one has no number."""
        name = model if iteration is None else f"{model}_{iteration:04d}"
        return self.checkpoints_folder / name

    def stopped(self, by: str, command: str = "train", key: str = "run.state_every") -> str:
        """Why a run ended that somebody stopped, and how to go on with it where a state of it is kept."""
        return f"{by}; {self.goes_on(command, key)}"

    def goes_on(self, command: str = "train", key: str = "run.state_every") -> str:
        """How to go on with a run that is over before its end: from its last state, where one is kept."""
        states = state_folders(self.checkpoints_folder)
        if not states:
            return f"no state to go on from is kept yet ({key}): start it anew"
        python = f"in Python `rlhfspec.resume({str(self.path)!r})`"
        first = state_number(states[0]) + 1
        return f"go on with `rlhfspec {command} --resume {self.path}`, {python}, from iteration {first} on"

    def set_status(self, state: str, reason: str = "") -> None:
        """Write state and reason into status.json. Raises StorageError."""
        self._writer.set(state, reason)

    def progress(self, iteration: int, phase: str) -> None:
        """Note in status.json how far the run is; iterations count from 0."""
        self._writer.progress(iteration, phase)

    def heartbeat(self) -> AbstractContextManager[None]:
        """Keep the heartbeat in status.json fresh while the block runs."""
        return self._writer.beating()

    def status(self) -> Status:
        """Read status.json; state `unknown` and why, when there is none or it is damaged."""
        return read_status(self.status_file)
