"""The tables between two marks of each benchmark's page: a row a figure, a column a machine; the rest is by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"
EXPLAINED = {"memory": ROOT / "docs" / "explanation" / "memory.md"}
"Pages of benchmarks that stand elsewhere."
NOT_MEASURED = "Not measured yet."
TABLE_MARKS = ("<!-- tables: python -m rlhfspec.benchmarks.pages -->", "<!-- end of tables -->")


def load_results(name: str) -> dict[str, dict[str, Any]]:
    """Return a benchmark's result files by machine, the newest first."""
    results = {path.parent.name: json.loads(path.read_text()) for path in RESULTS.glob(f"*/{name}.json")}
    newest = sorted(results, key=lambda machine: str(results[machine]["provenance"]["date"]), reverse=True)
    return {machine: results[machine] for machine in newest}


def names() -> list[str]:
    """Benchmarks that have a page."""
    return sorted([*(path.stem for path in PAGES.glob("*.md")), *EXPLAINED])


def path_of(name: str) -> Path:
    """Where a benchmark's page stands."""
    return EXPLAINED.get(name, PAGES / f"{name}.md")


def page(name: str) -> str:
    """Return a benchmark's page with its tables written anew. Raises ValueError when a mark is missing."""
    return between(TABLE_MARKS, path_of(name).read_text(), _tables(load_results(name)))


def between(marks: tuple[str, str], text: str, lines: Sequence[str]) -> str:
    """Return the text with these lines between two marks. Raises ValueError when a mark is missing."""
    before, rest = text.split(marks[0])
    return "\n".join([before + marks[0], *lines, marks[1] + rest.split(marks[1])[1]])


def _tables(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row a figure and a column a machine; figures of papers; the machines."""
    if not results:
        return [NOT_MEASURED]
    beside = {row["name"] for result in results.values() for row in result["provenance"].get("published", ())}
    figures = dict.fromkeys(figure for result in results.values() for figure in result["figures"])
    head = ["figure", *results]
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(
            f"| `{figure}` | {' | '.join(_cell(result, figure) for result in results.values())} |"
            for figure in figures
            if figure not in beside
        ),
        *_published_rows(results),
        *_process_rows(results),
        "",
        "| machine | processor | cores | threads | commit | date |",
        "|---|---|---|---|---|---|",
        *(_machine_row(machine, result["provenance"]) for machine, result in results.items()),
    ]


def _published_rows(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Figures of papers beside those simulated, of the first result that has some."""
    rows = next(
        (r["provenance"]["published"] for r in results.values() if "published" in r["provenance"]), None
    )
    if rows is None:
        return []
    # what matters is said once for neighbours that share it
    before = [None, *(row["matters"] for row in rows)]
    return [
        "",
        "| figure | published | simulated | range | deviation | what matters |",
        "|---|---|---|---|---|---|",
        *(
            f"| `{row['name']}` | {row['published']:.2f} | {row['simulated']:.2f} | {row['low']:.2f} to "
            f"{row['high']:.2f} | {row['deviation']:+.0%} | "
            f"{'as above' if row['matters'] == said else row['matters']} |"
            for row, said in zip(rows, before, strict=False)
        ),
    ]


def _process_rows(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What processes held, of the first result that has some: a column a key of its rows, and their sums."""
    rows = next(
        (r["provenance"]["processes"] for r in results.values() if "processes" in r["provenance"]), []
    )
    if not rows:
        return []
    numbers = [key for key in rows[0] if key != "process"]
    total = {"process": "all"} | {key: sum(row[key] for row in rows) for key in numbers}
    return [
        "",
        f"| {' | '.join(rows[0])} |",
        f"|{'---|' * len(rows[0])}",
        *(
            f"| {row['process']} | {' | '.join(f'{row[key]:,}' for key in numbers)} |"
            for row in (*rows, total)
        ),
    ]


def _cell(result: Mapping[str, Any], figure: str) -> str:
    if figure not in result["figures"]:
        return ""
    text = _number(result["figures"][figure])
    interval = result["intervals"].get(figure)
    if not interval or interval[0] == interval[1]:
        return text
    return f"{text} ({_number(interval[0])} to {_number(interval[1])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def _machine_row(machine: str, provenance: Mapping[str, Any]) -> str:
    words = (
        machine,
        provenance.get("device") or provenance["cpu_model"],
        provenance.get("num_cores", ""),
        provenance.get("num_threads", provenance.get("omp_num_threads") or ""),
        provenance["commit"],
        str(provenance["date"])[:10],
    )
    return f"| {' | '.join(str(word) for word in words)} |"
