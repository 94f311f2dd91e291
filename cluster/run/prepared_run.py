"""What `train`, `demo` and `check` do alike: open a config or a run, name its folder, look for what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.outside import user_path
from ..ray_start.forked_workers import begin_workers

if TYPE_CHECKING:
    from ...core.config import Config, RunConfig
    from ..observe.console import Reporter
    from ..plan.run_plan import RunPlan
    from ..ray_start.machine import Gpus
    from ..resume.resumed_run import ResumedRun

AUTO = "auto"
"Of --resume: the newest run of the config that is not finished, else a new one."


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that may start: nothing in its config, its files or here speaks against it."""

    plan: RunPlan
    path: Path
    "of the run folder, which is not made yet where the run is new"
    resumed: ResumedRun | None


def prepare_run(
    file: Path | None,
    overrides: list[str],
    report: Reporter,
    *,
    out: Path | None = None,
    resume: str | None = None,
    record: Path | None = None,
    fork: tuple[Path, int] | None = None,
    elsewhere: Gpus | None = None,
    dry_run: bool,
) -> PreparedRun:
    """Open a config, or the run to `resume`, and check it; nothing is written or started.

    `record`: a run folder whose rollouts are taken over, as `rollout.record`. `fork`: a run and how many of its
    iterations a new one goes on behind. `elsewhere`: as of `check_run`.

    Raises InputError for all that a run is refused for before Ray starts.
    """
    if out is not None and resume is not None:
        from ...core.errors import ConfigError

        raise ConfigError(
            f"--out {out} names a new run's folder; expected none beside --resume, which goes on in the run's own"
        )
    if record is not None:
        overrides = [*overrides, f"rollout.record={json.dumps(str(record))}"]
    if fork is not None:
        config, resumed = _forked(*fork, overrides, out, report, dry_run=dry_run)
    elif resume is None or resume == AUTO:
        config, resumed = _of_config(file, overrides, report, may_resume=resume == AUTO)
    else:
        config, resumed = _named_run(resume, file, overrides, report)
    if not dry_run:
        begin_workers(config.cluster.address)
    path = _path(config.run, out, report, dry_run=dry_run) if resumed is None else resumed.run_dir.path
    from ..folder.run_time import with_time
    from ..observe.console import START_UP_STAGES
    from ..plan.names import resolve_models

    report.stage(START_UP_STAGES["imports"])
    config = with_time(resolve_models(config, report))
    report.stage(START_UP_STAGES["check"])
    from ..plan.run_check import check_run
    from .recorded_rollouts import require_record

    require_record(config)
    # one that goes on has the end tokens that it began with
    plan = check_run(config, output_dir=path, keeps_ends=resumed is not None, elsewhere=elsewhere)
    if resumed is not None:
        resumed.require_same_data(plan.inputs.dataset)
    report.stop()
    return PreparedRun(plan=plan, path=path, resumed=resumed)


def _named_run(
    resume: str, file: Path | None, overrides: list[str], report: Reporter
) -> tuple[Config, ResumedRun]:
    from ...core.config import RunConfig
    from ...core.errors import ConfigError
    from ..folder.layout import run_base
    from ..folder.remote_copy import fetch_run, is_url
    from ..resume.resumed_run import open_run

    if file is not None:
        raise ConfigError(
            f"--resume {resume} goes on with that run by its own config, so that its result stays the same; "
            "expected no --config beside it; change keys with --set (--config belongs to --resume auto)"
        )
    folder = user_path(resume)
    if is_url(resume):
        folder = fetch_run(resume, run_base(RunConfig(), caller_dir=Path.cwd()), report.note)
    resumed = open_run(folder, overrides, report.note)
    return resumed.config, resumed


def _forked(
    run: Path, at: int, overrides: list[str], out: Path | None, report: Reporter, *, dry_run: bool
) -> tuple[Config, ResumedRun | None]:
    from ..folder.layout import RunDir
    from ..resume.forked_run import ForkedRun, open_fork

    config, state = open_fork(run, at, overrides)
    if state is None:
        return config, None
    path = _path(config.run, out, report, dry_run=dry_run)
    return config, ForkedRun(config=config, run_dir=RunDir(path=path), state=state)


def _of_config(
    file: Path | None, overrides: list[str], report: Reporter, *, may_resume: bool
) -> tuple[Config, ResumedRun | None]:
    from ...core.config_io import load_config
    from ...core.errors import ConfigError
    from ..folder.absolute_paths import with_absolute_paths
    from ..folder.layout import run_base

    if file is None:
        raise ConfigError("expected --config FILE, got none; or --resume RUN to go on with a run by its own")
    config = with_absolute_paths(load_config(file, overrides), Path.cwd())
    if not may_resume:
        return config, None
    from ..plan.names import resolve_models
    from ..resume.resumed_run import newest_run

    # what a run's own config has
    config = resolve_models(config, report)
    base = run_base(config.run, caller_dir=Path.cwd())
    if config.run.copy_to is not None:
        from ..folder.remote_copy import fetch_newest

        fetch_newest(config.run.copy_to, config.run.name, base, report.note)
    return config, newest_run(config, base, report.note)


def _path(run: RunConfig, out: Path | None, report: Reporter, *, dry_run: bool) -> Path:
    from ..folder.layout import choose_run_path, is_ray_working_dir

    path = choose_run_path(run, caller_dir=Path.cwd(), now=datetime.now(), out=out)
    report.note(f"run folder {path}" + (" (dry run: not made)" if dry_run else ""))
    if out is None and is_ray_working_dir(Path.cwd()):
        report.note("  not in the job's own folder, which Ray deletes; run.output_dir says where else")
    return path
