"""The tables: one row a figure and one column a machine; the README's five rows, each with command, commit, processor.

A test fails where a page or the README differs from the result files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages.about import ABOUT, About

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MARKS = ("<!-- figures: python -m benchmarks.pages -->", "<!-- end of figures -->")
HEADLINE_MACHINE = "intel-xeon-2c"


def load_results(name: str) -> dict[str, dict[str, Any]]:
    """Return a benchmark's result files by machine, the README's first."""
    paths = sorted(
        RESULTS.glob(f"*/{name}.json"), key=lambda path: (path.parent.name != HEADLINE_MACHINE, path)
    )
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def page(name: str) -> str:
    """Return the text of a benchmark's page."""
    about, results = ABOUT[name], load_results(name)
    beside = {row["name"] for result in results.values() for row in result["provenance"].get("published", ())}
    figures = [
        figure
        for figure in dict.fromkeys(figure for result in results.values() for figure in result["figures"])
        if figure not in beside
    ]
    head = ["figure", *results]
    lines = [
        f"# {about.title}",
        "",
        f"{about.question} Written by `python -m benchmarks.pages` from `benchmarks/results/`.",
        "",
        f"```\n{_command(name)}\n```",
        "",
        about.how,
        "",
        *_picture(about),
        "Ratios are named `a_over_b`, above 1 when `a` is better; in brackets the 95% interval, where there is one. "
        "A column was measured with the code of its commit.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(
            f"| `{figure}` | {' | '.join(_cell(result, figure) for result in results.values())} |"
            for figure in figures
        ),
        *_published_rows(results),
        "",
        "| machine | processor | cores | threads | commit | date |",
        "|---|---|---|---|---|---|",
        *(_machine_row(machine, result["provenance"]) for machine, result in results.items()),
    ]
    return "\n".join(lines) + "\n"


def _picture(about: About) -> list[str]:
    if not about.picture or not load_results(about.picture):
        return []
    return [f"![{ABOUT[about.picture].question}]({about.picture}.svg)", ""]


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


def readme_rows() -> str:
    """Return the README's five rows, marks included."""

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
    table = ["| what | figure | command | commit, processor |", "|---|---|---|---|", *rows]
    return "\n".join([MARKS[0], *table, MARKS[1]])


def with_figures(readme: str) -> str:
    """Return the README with its rows written anew. Raises ValueError when a mark is missing."""
    before, rest = readme.split(MARKS[0])
    return before + readme_rows() + rest.split(MARKS[1])[1]


def _command(name: str) -> str:
    bench = name.removesuffix("_real") + (" --real" if name.endswith("_real") else "")
    words = f"rlhfspec bench {bench} --out bench"
    return (
        words
        + (" --full" if ABOUT[name].full else "")
        + (" --data gsm8k_train.jsonl" if ABOUT[name].data else "")
    )


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
