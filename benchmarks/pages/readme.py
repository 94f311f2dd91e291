"""The README's table of figures: a row is a claim, the benchmark that measures it, and the figures that it shows.

`benchmarks/results/readme.json` says which machine's result a row is shown from, and of results that are older than
the engine of today what has changed since (`make bench-readme` makes them anew, see `benchmarks/pages/measure.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from ..support.result import git
from .tables import RESULTS, ROOT, between, load_results

MARKS = ("<!-- figures: python -m rlhfspec.benchmarks.pages -->", "<!-- end of figures -->")
SHOWN = RESULTS / "readme.json"
MOST_COMMITS = 100
"That the engine may have gone on since a figure was measured, before the README must say so."


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row."""

    what: str
    result: str
    "name of the result file"
    text: str
    "with figures in braces, as `str.format` takes them; `{date}` is that of the result"
    arguments: tuple[str, ...] = ()
    "of `rlhfspec bench` that makes the result; empty where no command of ours does"

    @property
    def command(self) -> str:
        """As a user writes it."""
        return " ".join(("rlhfspec bench", *self.arguments)) if self.arguments else "docs/explanation/cuda.md"

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures that the row shows."""
        named = [name for _, name, _, _ in Formatter().parse(self.what + self.text) if name]
        return tuple(name for name in named if name != "date")


ROWS = (
    Row(
        what="Samples whose tokens or log-probabilities differ from plain decoding",
        result="exactness",
        arguments=("exactness",),
        text="{mismatches:.0f} of {samples:,.0f} ({tokens:,.0f} tokens)",
    ),
    Row(
        what="Whole rollout of the demo pair, adaptive drafting: over plain; over Hugging Face `generate`",
        result="drafting",
        arguments=("drafting",),
        text="{rollout_over_plain_demo:.2f}; {rollout_over_hf_demo:.1f}",
    ),
    Row(
        what="The same over the best fixed plan, found afterwards; a useless draft over plain decoding",
        result="drafting",
        arguments=("drafting",),
        text="{rollout_over_best_fixed_demo:.2f}; {useless_over_plain_demo:.2f}",
    ),
    Row(
        what="Whole step of the demo over plain and static",
        result="rlhf",
        arguments=("rlhf",),
        text="{step_over_plain_static:.2f}",
    ),
    Row(
        what="Whole step of SmolLM2-135M over plain and static, answers of 32 tokens at most",
        result="rlhf_real",
        arguments=("rlhf", "--real"),
        text="{step_over_plain_static:.2f}",
    ),
    Row(
        what="Plain decoding at batch 8 over Hugging Face, llama.cpp, vLLM's CPU build, OpenVINO GenAI",
        result="engine",
        arguments=("engine",),
        text="{plain_over_hf_b8:.2f}, {plain_over_llama_cpp_b8:.2f}, {plain_over_vllm_b8:.2f}, "
        "{plain_over_openvino_b8:.2f}",
    ),
    Row(
        what="Live migration: samples changed; how long a moved sample rests, in decode steps",
        result="migration",
        arguments=("migration",),
        text="{mismatches:.0f} of {samples:.0f} in {migrations:,.0f} moves; {downtime_decode_steps_median:.2f}",
    ),
    Row(
        what="8B shape in bfloat16, one sample, {date}: decode step, reading the weights alone, tree of 16, ms",
        result="device_ops",
        text="{step_ms_8b_plain_b1:.1f}; {step_ms_8b_bound:.1f}; {step_ms_8b_tree16_b1:.1f}",
    ),
)


def shown() -> dict[str, dict[str, str]]:
    """`machines`: by result, whose is shown; `before`: by commit, what has changed since."""
    return json.loads(SHOWN.read_text())


def shown_result(name: str) -> dict[str, Any]:
    """Return the result of a benchmark that the README shows."""
    return load_results(name)[shown()["machines"][name]]


def shown_commit(name: str, machine: str) -> str:
    """Return the commit that a benchmark's result of a machine was measured at."""
    return load_results(name)[machine]["provenance"]["commit"]


def shown_rows() -> list[Row]:
    """Rows that have been measured."""
    return [row for row in ROWS if row.result in shown()["machines"]]


def shown_commits() -> list[str]:
    """Commits of the rows, in their order."""
    machines = shown()["machines"]
    return list(dict.fromkeys(shown_commit(row.result, machines[row.result]) for row in shown_rows()))


def with_figures(readme: str, rows: Sequence[Row] | None = None) -> str:
    """Return the README with its rows, or some, written anew. Raises ValueError when a mark is missing."""
    lines = ["| what | figure | command, beside `--out DIR` | commit, processor |", "|---|---|---|---|"]
    lines += [_line(row, shown_result(row.result)) for row in (shown_rows() if rows is None else rows)]
    return between(MARKS, readme, [*lines, *_older()])


def _line(row: Row, result: Mapping[str, Any]) -> str:
    provenance = result["provenance"]
    figures = result["figures"] | {"date": str(provenance["date"])[:10]}
    processor = provenance.get("device") or provenance["cpu_model"]
    where = f"{provenance['commit']}, {processor.replace('(R)', '').removesuffix(' Processor')}"
    return f"| {row.what.format_map(figures)} | {row.text.format_map(figures)} | `{row.command}` | {where} |"


def _older() -> list[str]:
    """One sentence of the rows that an older engine measured, by what has changed since."""
    since: dict[str, list[str]] = {}
    for commit in shown_commits():
        if commit in shown()["before"]:
            since.setdefault(shown()["before"][commit], []).append(commit)
    said = [f"at {', '.join(commits)}, before {change}" for change, commits in since.items()]
    return ["", f"Measured {'; '.join(said)}."] if said else []


def commits_behind(commit: str, *, root: Path = ROOT, folder: str = "engine") -> int | None:
    """Commits from this one to the last that changed a folder; None where the history does not have it."""
    last = git("log", "-1", "--format=%H", "--", folder, root=root)
    if git("merge-base", "--is-ancestor", commit, "HEAD", root=root) is None:
        return None
    count = git("rev-list", "--count", f"{commit}..{last}", root=root)
    return None if count is None else int(count)


def has_history(root: Path = ROOT) -> bool:
    """Whether a checkout knows its commits: a copy without git and a shallow clone do not."""
    return git("rev-parse", "--is-shallow-repository", root=root) == "false"


def wrong_commits(readme: str, commits: Sequence[str], *, root: Path = ROOT) -> list[str]:
    """Return what is wrong with the commits that a README shows, one line each; needs the history.

    A commit is of the history, and the engine has changed in at most `MOST_COMMITS` commits since, or the README says
    "measured at .., before ..".
    """
    wrong = []
    for commit in commits:
        behind = commits_behind(commit, root=root)
        excused = re.search(rf"[Mm]easured [^.]*\bat [^.;]*\b{commit}\b[^.;]*, before \w", readme)
        if behind is None:
            wrong.append(f"{commit} is no commit of the history")
        elif behind > MOST_COMMITS and not excused:
            wrong.append(f"{commit} is {behind} commits older than the engine, at most {MOST_COMMITS} are")
    return wrong
