"""The tables between two marks of each page and of the README; what stands around them is written by hand.

One row a figure and one column a machine; the README's five rows have command, commit and processor.

A test fails where a page or the README differs from the result files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"
TABLE_MARKS = ("<!-- tables: python -m benchmarks.pages -->", "<!-- end of tables -->")
MARKS = ("<!-- figures: python -m benchmarks.pages -->", "<!-- end of figures -->")
HEADLINE_MACHINE = "intel-xeon-2c"


def load_results(name: str) -> dict[str, dict[str, Any]]:
    """Return a benchmark's result files by machine, the README's first."""
    paths = sorted(
        RESULTS.glob(f"*/{name}.json"), key=lambda path: (path.parent.name != HEADLINE_MACHINE, path)
    )
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def names() -> list[str]:
    """Benchmarks that have a page."""
    return sorted(path.stem for path in PAGES.glob("*.md"))


def page(name: str) -> str:
    """Return a benchmark's page with its tables written anew. Raises ValueError when a mark is missing."""
    return _between(TABLE_MARKS, (PAGES / f"{name}.md").read_text(), _tables(load_results(name)))


def with_figures(readme: str) -> str:
    """Return the README with its rows written anew. Raises ValueError when a mark is missing."""
    return _between(MARKS, readme, readme_rows())


def _between(marks: tuple[str, str], text: str, lines: Sequence[str]) -> str:
    before, rest = text.split(marks[0])
    return "\n".join([before + marks[0], *lines, marks[1] + rest.split(marks[1])[1]])


def _tables(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row a figure and a column a machine; figures of papers; the machines."""
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


def readme_rows() -> list[str]:
    """Return the README's table of five rows."""

    def row(what: str, name: str, text: str) -> str:
        provenance = load_results(name)[HEADLINE_MACHINE]["provenance"]
        processor = provenance["cpu_model"].replace("(R)", "").removesuffix(" Processor")
        where = f"{provenance['commit']}, {processor}"
        return f"| {what} | {text} | `rlhfspec bench {name}` | {where} |"

    exact, engine, drafting, migration = (
        load_results(name)[HEADLINE_MACHINE]["figures"]
        for name in ("exactness", "engine", "drafting", "migration")
    )
    rows = [
        row(
            "Samples whose tokens or log-probabilities differ from plain decoding",
            "exactness",
            f"{exact['mismatches']:.0f} of {exact['samples']:.0f} ({exact['tokens']:,.0f} tokens)",
        ),
        row(
            "Whole rollout, adaptive drafting: over plain decoding; over Hugging Face `generate`",
            "drafting",
            f"{drafting['rollout_over_plain_demo']:.2f}; {drafting['rollout_over_hf_demo']:.1f}",
        ),
        row(
            "The same over the best fixed plan, found afterwards; a useless draft over plain decoding",
            "drafting",
            f"{drafting['rollout_over_best_fixed_demo']:.2f}; {drafting['useless_over_plain_demo']:.2f}",
        ),
        row(
            "Plain decoding at batch 8 over Hugging Face, vLLM's CPU build, OpenVINO GenAI",
            "engine",
            f"{engine['plain_over_hf_b8']:.2f}, {engine['plain_over_vllm_b8']:.2f}, "
            f"{engine['plain_over_openvino_b8']:.2f}",
        ),
        row(
            "Live migration: samples changed; how long a moved sample rests, in decode steps",
            "migration",
            f"{migration['mismatches']:.0f} of {migration['samples']:.0f} in {migration['migrations']:,.0f} moves; "
            f"{migration['downtime_decode_steps_median']:.2f}",
        ),
    ]
    return ["| what | figure | command | commit, processor |", "|---|---|---|---|", *rows]


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
        provenance["cpu_model"],
        provenance["num_cores"],
        provenance.get("num_threads", provenance.get("omp_num_threads") or ""),
        provenance["commit"],
        str(provenance["date"])[:10],
    )
    return f"| {' | '.join(str(word) for word in words)} |"
