"""`rlhfspec report`: everything of a run on one page, one HTML file that needs nothing else.

What the folder lacks is said in its place, and what cannot be read is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ...core.config_io import read_tree
from ...core.errors import ConfigError
from ...core.files import write_whole
from ...core.outside import visible
from ..folder.iteration_logs import read_moves
from ..folder.layout import RunDir
from ..folder.run_status import describe_status
from ..observe.explanation import explain_run, no_iteration
from ..observe.run_record import RunRecord
from ..observe.summary import STEP_PARTS, Summary
from ..observe.timeline import kept_iterations, kept_trace, read_trace
from .charts import draw, draw_timeline, number
from .samples import GIVEN, IterationSamples, read_decoder, read_iterations

MOST_ROWS = 20
"Of a table."
_COLUMNS = {
    "reward/mean": "reward",
    "reward/accuracy": "accuracy",
    "rollout/response_tokens_mean": "tokens",
    "rollout/mean_acceptance_length": "acceptance length",
    "train/loss": "training loss",
    "eval/loss": "held-out loss",
    "time/generate_s": "generate, s",
    "time/iteration_s": "whole, s",
    "time/step_s": "step, s",
}
_CHARTS: Sequence[tuple[str, str, Mapping[str, str], bool]] = (
    (
        "outcome",
        "Reward",
        {"mean": "reward/mean", "accuracy": "reward/accuracy", "held-out mean": "eval/reward_mean"},
        False,
    ),
    ("outcome", "Loss", {"training": "train/loss", "held out": "eval/loss"}, False),
    (
        "outcome",
        "Length of responses, tokens",
        {
            "mean": "rollout/response_tokens_mean",
            "median": "rollout/response_tokens_p50",
            "90% are shorter": "rollout/response_tokens_p90",
        },
        True,
    ),
    (
        "acceptance",
        "Acceptance length, tokens a decode step",
        {"mean": "rollout/mean_acceptance_length"},
        True,
    ),
    (
        "time",
        "Seconds an iteration",
        {"whole": "time/iteration_s", "update": "time/update_s", "generate": "time/generate_s"},
        True,
    ),
    ("time", "Seconds a step", {"step": "time/step_s"}, True),
)
"Section, title, metric by the name of its line, whether 0 is in the scale."


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Head and rows, as text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left_out: int = 0


def write_report(run_dir: RunDir, iteration: int | None, out: Path | None) -> Path:
    """Write the page, and return where.

    Args:
        run_dir: of a run that lives or has ended.
        iteration: whose timeline is drawn, counted from 1; None for the last that is kept.
        out: the file; None for RUN-report.html in the current folder.

    Raises ConfigError for an iteration that has no timeline, DataError: there is nothing,
    StorageError where the file cannot be written.
    """
    path = out or Path.cwd() / f"{run_dir.path.name}-report.html"
    write_whole(path, render(read_page(run_dir, iteration)))
    return path


def render(page: Mapping[str, Any]) -> str:
    """The page as HTML; what a browser or a terminal would obey in a text of the run is written out."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    return environment.get_template("page.html").render(page=page)


def _shown(value: object) -> object:
    return visible(value) if isinstance(value, str) else value


def read_page(run_dir: RunDir, iteration: int | None = None) -> dict[str, Any]:
    """What the template shows; of a part that is a text, the text says why there is nothing to show.

    Raises ConfigError: the iteration has no timeline; DataError: there is nothing.
    """
    notes: list[str] = []
    run = RunRecord.read(run_dir.path, notes.append)
    summary, rows = run.summary, run.rows
    is_supervised = summary is None and bool(rows)
    timeline, moves = _timeline(run_dir, iteration, notes.append, is_supervised=is_supervised)
    samples = read_iterations(run_dir.path, read_decoder(_tokenizer_folders(run_dir)), notes.append)
    if not (run.metrics or samples or kept_iterations(run_dir)):
        raise no_iteration(run_dir)
    num_starts = len([*run_dir.path.glob("owners/*.json")])
    resumed = [f"resumed {num_starts - 1} times"] if num_starts > 1 else []
    charts, depths = _charts(run, _parent(run, notes.append)), _depths(samples)
    if not isinstance(depths, str):
        lines = {f"iteration {one.iteration}": list(enumerate(one.depths or (), start=1)) for one in samples}
        by_depth = draw("Accepted in a row, share of decode steps", lines, x_label="depth", from_zero=True)
        charts["acceptance"] = [*([by_depth] if by_depth else ()), *charts.get("acceptance", ())]
    return {
        "name": run.name,
        "state": [*describe_status(run_dir.status()), *resumed],
        "explained": _explained(run, notes.append),
        "achieved": _achieved(rows),
        "charts": charts,
        "iterations": _iterations(run),
        "timeline": timeline,
        "moves": moves,
        "depths": depths,
        "samples": samples,
        "has_given": any(kind == GIVEN for part in samples for one in part.samples for _, kind in one.pieces),
        "samples_missing": "A supervised run samples nothing."
        if is_supervised
        else "No rollouts are in the folder.",
        "time": _time(summary, run)
        if summary
        else "A supervised run times its steps whole."
        if is_supervised
        else "No iteration has finished.",
        "amdahl": dict(rows).get("faster generation (Amdahl)", ""),
        "notes": notes,
    }


def _explained(run: RunRecord, note: Callable[[str], None]) -> Sequence[tuple[str, str]]:
    try:
        explained = explain_run(run)
    except ConfigError as error:
        note(f"what to change next is not known: {error}")
        return []
    return explained.rows() if explained is not None else []


def _achieved(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The closing table without the parts of the time, each label of its own."""
    kept, above = [], ""
    for label, value in rows:
        if label.strip() in (*STEP_PARTS, "other"):
            continue
        kept.append((f"{above}, {label.strip()}" if label.startswith(" ") else label, value))
        above = label
    return kept


def _parent(run: RunRecord, note: Callable[[str], None]) -> RunRecord | None:
    """The run whose record this one goes by."""
    try:
        rollout = read_tree(run.run_dir.config_file).get("rollout")
        record = rollout.get("record") if isinstance(rollout, dict) else None
        return RunRecord.read(record, note) if isinstance(record, str) else None
    except ConfigError as error:
        note(f"the run of rollout.record is not drawn: {error}")
        return None


def _charts(run: RunRecord, parent: RunRecord | None) -> dict[str, list[dict[str, Any]]]:
    charts: dict[str, list[dict[str, Any]]] = {}
    for section, title, metrics, from_zero in _CHARTS:
        lines = {name: list(zip(*run.series(metric), strict=True)) for name, metric in metrics.items()}
        if parent is not None and "reward/mean" in metrics.values():
            lines[f"mean of {parent.name}"] = list(zip(*parent.series("reward/mean"), strict=True))
        chart = draw(title, lines, x_label="iteration", from_zero=from_zero)
        if chart is not None:
            charts.setdefault(section, []).append(chart)
    return charts


def _iterations(run: RunRecord) -> Table | None:
    names = [name for name in _COLUMNS if any(name in row for row in run.metrics)]
    if not names:
        return None
    count = min(len(run.metrics), MOST_ROWS)
    places = sorted({round(at * (len(run.metrics) - 1) / max(count - 1, 1)) for at in range(count)})
    rows = [
        [number(row["iteration"] + 1), *(number(row[name]) if name in row else "-" for name in names)]
        for row in (run.metrics[place] for place in places)
    ]
    head = ["iteration", *(_COLUMNS[name] for name in names)]
    return Table(head=head, rows=rows, num_left_out=len(run.metrics) - len(rows))


def _timeline(
    run_dir: RunDir, iteration: int | None, note: Callable[[str], None], *, is_supervised: bool
) -> tuple[dict[str, Any] | str, Table | None]:
    if is_supervised and iteration is None:
        return "A supervised run decodes nothing.", None
    if iteration is None and not kept_iterations(run_dir):
        return "No trace of an iteration is in the folder.", None
    try:
        at, text = kept_trace(run_dir, iteration)
        trace = read_trace(text)
    except ConfigError as error:
        if iteration is not None:
            raise
        note(str(error))
        return "The trace of the last iteration cannot be read; --iteration draws another.", None
    lines = read_moves(run_dir.moves_file, at)
    recomputed = {str(line.get("move")): "" for line in lines if line.get("mode") == "recompute"}
    chart = draw_timeline(trace, iteration=at + 1, recomputed=recomputed)
    return chart or f"Nothing was decoded in iteration {at + 1}.", _moves(lines)


def _moves(lines: Sequence[Mapping[str, Any]]) -> Table | None:
    if not lines:
        return None
    names = ("sample_index", "source", "destination", "mode", "outcome", "why_ordered")
    rows = [[str(line.get(name, "-")) for name in names] for line in lines[:MOST_ROWS]]
    head = ("sample", "from", "to", "mode", "outcome", "why")
    return Table(head=head, rows=rows, num_left_out=len(lines) - len(rows))


def _depths(samples: Sequence[IterationSamples]) -> Table | str:
    known = [one for one in samples if one.depths is not None]
    if not known:
        return "How deep drafts were accepted is not in the folder's rollouts."
    deepest = max(len(one.depths or ()) for one in known)
    if not deepest:
        return "Nothing drafted was accepted in these iterations, or nothing was drafted."
    rows = [
        [
            str(depth + 1),
            *(
                f"{one.depths[depth]:.0%}" if one.depths and depth < len(one.depths) else "0%"
                for one in known
            ),
        ]
        for depth in range(deepest)
    ]
    return Table(head=["depth", *(f"iteration {one.iteration}" for one in known)], rows=rows)


def _time(summary: Summary, run: RunRecord) -> Table:
    """Seconds and share of each part, of the whole run and of its last iteration."""
    last, total_s = run.metrics[-1], summary.total_s
    last_s = last.get("time/iteration_s", 0.0)
    parts = {part: last.get(f"time/{part}_s", 0.0) for part in STEP_PARTS}
    parts["other"] = max(0.0, last_s - sum(parts.values()))
    rows = [
        [
            part,
            f"{seconds:.1f}",
            f"{seconds / max(total_s, 1e-9):.0%}",
            f"{parts[part]:.2f}",
            f"{parts[part] / max(last_s, 1e-9):.0%}",
        ]
        for part, seconds in summary.part_s.items()
        if seconds or part != "evaluate"
    ]
    rows.append(["whole", f"{total_s:.1f}", "100%", f"{last_s:.2f}", "100%"])
    return Table(head=["part", "run, s", "share", "last iteration, s", "share"], rows=rows)


def _tokenizer_folders(run_dir: RunDir) -> list[Path]:
    """Where the run's tokenizer may lie: its checkpoints, then what its config names."""
    checkpoints = run_dir.checkpoints_folder
    found = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    try:
        models = read_tree(run_dir.config_file).get("models")
    except ConfigError:
        models = None
    named = [models.get(key) for key in ("tokenizer", "target")] if isinstance(models, dict) else []
    return [*found, *(Path(name) for name in named if isinstance(name, str) and "\0" not in name)]
