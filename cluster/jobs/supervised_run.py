"""One supervised training from a config to a run folder.

RUN/config.yaml, RUN/status.json    as of `rlhfspec train`
RUN/metrics.jsonl                   one object a step: train/*, every few steps eval/*; step 0 is before the first
RUN/checkpoints/model               the last checkpoint, what --model, models.target and reward.model take
RUN/checkpoints/{adapter,model_0100,state_0100}     see `learning.training.supervised_job`
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ...core.checkpoint_manifest import state_folders, state_number
from ...core.config import RunConfig
from ...core.config_io import dump_config, load_config_of
from ...core.errors import describe_error
from ...core.files import storage_errors, write_whole
from ...core.metrics import MetricsLog, read_metrics
from ...core.settings.supervised import SupervisedConfig
from ...learning.training.supervised_job import CONFIG_FILE, SupervisedJob, last_state, require_same
from ..folder.layout import RunDir, choose_run_path
from ..folder.run_time import of_folder, with_time
from ..observe.console import Reporter
from ..observe.outcome_checks import unmoved_line
from ..observe.summary import SILENT_ADVICE, is_silent
from ..resume.changed_keys import deciding_changes, require_own_config
from ..resume.resumed_run import require_cut_off, take_over
from ..resume.rewind import note_gaps, whole_lines
from .job_inputs import prepare
from .job_runner import run

FOLDERS = ("checkpoints",)
_LINE_EVERY_S = 2.0


def train_supervised(config: SupervisedConfig, report: Reporter, *, out: Path | None) -> Path:
    """Begin a training and run it to its end; the checkpoint's folder. `out` names the run folder itself.

    Raises ConfigError, ModelError and DataError before the folder is made; then what the job raises.
    """
    config = with_time(config)
    settings = RunConfig(name=config.run.name, output_dir=config.run.output_dir)
    path = choose_run_path(settings, caller_dir=Path.cwd(), now=datetime.now(), out=out)
    report.note(f"run folder {path}")
    report.stage("reading model and rows")
    prepared = prepare(config, path / "checkpoints", report)
    run_dir = RunDir.create(config, path, folders=FOLDERS)
    # another run may have taken the name
    job = prepared.job if run_dir.path == path else prepare(config, run_dir.checkpoints_folder, report).job
    report.stop()
    for line in prepared.lines:
        report.note(line)
    return _run(config, job, run_dir, report)


def resume_supervised(config: SupervisedConfig, report: Reporter, *, folder: Path) -> Path:
    """Go on with the run in `folder` from its last state; the checkpoint's folder. Errors as above."""
    run_dir = RunDir.open(folder)
    require_cut_off(run_dir)
    config = of_folder(config, run_dir.path)
    state = last_state(run_dir.checkpoints_folder, report.note)
    kept = state / CONFIG_FILE
    require_own_config(run_dir.config_file, kept)
    report.note(f"run folder {run_dir.path}, from {state.name}")
    for change in deciding_changes(load_config_of(type(config), kept), config) if kept.is_file() else ():
        report.note(
            f"{change}: what follows is learned by the new value, and ends elsewhere than it would have"
        )
    report.stage("reading model and rows")
    prepared = prepare(config, run_dir.checkpoints_folder, report, resume=state)
    report.stop()
    for line in prepared.lines:
        report.note(line)
    require_same(prepared.job, state)
    # another may have begun meanwhile
    take_over(run_dir)
    dump_config(config, run_dir.config_file)
    _forget_later(run_dir, state_number(state), report.note)
    rows = read_metrics(run_dir.metrics_file) if run_dir.metrics_file.is_file() else []
    losses = tuple(row["eval/loss"] for row in rows if "eval/loss" in row)
    return _run(config, replace(prepared.job, eval_losses=losses), run_dir, report)


def _run(config: SupervisedConfig, job: SupervisedJob, run_dir: RunDir, report: Reporter) -> Path:
    metrics = MetricsLog(run_dir.metrics_file)
    evaluation: Mapping[str, float] = {}
    first_loss: float | None = None
    num_silent = num_steps = 0
    losses: set[float] = set()
    try:
        with (
            storage_errors(run_dir.path, only_known=True),
            run_dir.heartbeat(),
            report.job("training") as tick,
        ):
            ticker = _Ticker(tick, report.clock, job.total_steps)
            for step in run(config, job, run_id=run_dir.path.name):
                run_dir.owner.require()
                num_steps = step.step
                metrics.write(step.step, step.metrics)
                run_dir.progress(step.step, "train")
                own = {name: value for name, value in step.metrics.items() if name.startswith("eval/")}
                evaluation = {name.removeprefix("eval/"): value for name, value in own.items()} or evaluation
                first_loss = evaluation.get("loss") if first_loss is None else first_loss
                ticker.show(step.step, step.metrics)
                losses |= {loss for name, loss in step.metrics.items() if name == "train/loss"}
                if step.unmoved:
                    report.note(f"step {step.step}: {unmoved_line(step.unmoved)}")
                if is_silent(step.metrics):
                    num_silent += 1
                    if num_silent == 1:
                        report.note(
                            f"step {step.step}: the gradient is 0 and nothing was learned: the loss is "
                            f"{step.metrics['train/loss']:.4g}; {SILENT_ADVICE}"
                        )
    except BaseException as error:
        is_stop = isinstance(error, KeyboardInterrupt | SystemExit)
        with suppress(Exception):
            why = describe_error(error)
            if isinstance(error, KeyboardInterrupt):
                command = {"reward": "train-reward"}.get(job.kind, job.kind)
                why = run_dir.stopped("stopped by Ctrl-C", command, "trainer.checkpoint_every")
                error.args = (why,)
                report.note(f"interrupted: {why}")
            run_dir.set_status("interrupted" if is_stop else "failed", why)
        raise
    run_dir.set_status("finished")
    if num_steps < job.total_steps:
        report.note(
            f"eval/loss was not below its lowest in {config.trainer.early_stopping_patience} evaluations: training "
            f"ended at step {num_steps} of {job.total_steps} (trainer.early_stopping_patience)"
        )
    if len(losses) == 1 and job.total_steps > 1 and not num_silent:
        report.note(
            f"the loss was {losses.pop():.6g} in every step, to the last bit: nothing was learned; see whether the "
            "rows have anything to be learned, and whether trainer.learning_rate moves any weight"
        )
    if num_silent:
        report.note(f"{num_silent} steps had a gradient of 0 and learned nothing; {SILENT_ADVICE}")
    if evaluation:
        report.note(
            "held out  " + "  ".join(f"{name} {value:.4f}" for name, value in sorted(evaluation.items()))
        )
    if first_loss is not None and evaluation["loss"] > first_loss:
        report.note(
            f"the held-out loss rose from {first_loss:.4f} to {evaluation['loss']:.4f}: the model got worse; lower "
            f"trainer.learning_rate{'' if config.trainer.keep_best else ', or keep the best (trainer.keep_best)'}"
        )
    if config.trainer.keep_best:
        has = (job.folder / "best").is_dir()
        report.note(
            f"model of the lowest eval/loss {job.folder / 'best'}"
            if has
            else "no evaluation was below that of the model that training began with: no best is kept"
        )
    report.note(f"model {job.folder / 'model'}")
    return job.folder / "model"


def _forget_later(run_dir: RunDir, step: int, note: Callable[[str], None]) -> None:
    """Drop metrics and states of steps after the state that is gone on from: they are taken again.

    `note` is told of steps before it whose line is cut or gone.
    """
    for state in state_folders(run_dir.checkpoints_folder):
        if state_number(state) > step:
            with storage_errors(state):
                shutil.rmtree(state)
    file = run_dir.metrics_file
    lines = whole_lines(file, lambda row: row["iteration"] <= step)
    note_gaps(file, "iteration", step + 1, lines, note, first=1)
    if lines:
        write_whole(file, "".join(f"{line}\n" for line in lines))


class _Ticker:
    """Tells of steps as often as a person reads, and of every evaluation."""

    def __init__(self, tick: Callable[[str, float], None], clock: Callable[[], float], total: int) -> None:
        self._tick, self._clock, self._total = tick, clock, total
        self._shown_s = -_LINE_EVERY_S

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say what a step did, unless the last was told of a moment ago."""
        now_s = self._clock()
        if now_s - self._shown_s < _LINE_EVERY_S and "eval/loss" not in metrics:
            return
        self._shown_s = now_s
        self._tick(_line(step, self._total, metrics), step / self._total)


def _line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    shown = [
        ("train/loss", "loss {:.4f}"),
        ("train/accuracy", "accuracy {:.2f}"),
        ("eval/loss", "held out {:.4f}"),
        ("eval/accuracy", "accuracy {:.3f}"),
        ("train/tokens_per_s", "{:,.0f} tokens/s"),
    ]
    parts = [form.format(metrics[name]) for name, form in shown if name in metrics]
    return "  ".join([f"step {step}/{total}", *parts])
