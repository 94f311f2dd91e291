"""The tables between two marks of each page and of the README, and the pictures; what stands around is written by hand.

One row a figure and one column a machine; the README's six rows have command, commit and processor. A test fails where
a page or the README differs from the result files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

DRAFTS = {"": "trained draft", "_weak": "weak draft", "_useless": "useless draft"}
BATCHES = (1, 4, 8, 16, 32)
BUDGET_TOKENS = 36_000
"That `drafter make` takes by itself."


def draw_speedup(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the best fixed plan over plain decoding for each draft and batch, with 95% intervals, as SVG."""
    figures, intervals = result["figures"], result["intervals"]
    chart = Figure(figsize=(6, 2.6), layout="constrained")
    axes = chart.subplots()
    for suffix, label in DRAFTS.items():
        names = {batch: f"spec_over_plain_b{batch}{suffix}" for batch in BATCHES}
        names = {BATCHES.index(batch): name for batch, name in names.items() if name in figures}
        heights = [figures[name] for name in names.values()]
        axes.plot(list(names), heights, marker="o", label=label)
        axes.vlines(
            list(names), *zip(*(intervals[name] for name in names.values()), strict=True), colors="gray"
        )
        for place, height in zip(names, heights, strict=True):
            axes.annotate(
                f"{height:.2f}x",
                (place, height),
                (5, 4 if height > 1.0 else -10),
                textcoords="offset points",
                fontsize=8,
            )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="plain decoding")
    axes.set_xticks(range(len(BATCHES)), [f"batch {batch}" for batch in BATCHES])
    axes.set_ylabel("speed-up")
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.2, len(BATCHES) - 0.5)
    axes.legend(fontsize=8, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    _save(chart, path)


def draw_learning_curve(path: Path, result: Mapping[str, Any]) -> None:
    """Draw tokens a step of heads over the own tokens that they were made from, as SVG."""
    figures = result["figures"]
    points = sorted(int(name.rsplit("_", 1)[1]) for name in figures if name.startswith("tree_length_"))
    chart = Figure(figsize=(6, 2.6), layout="constrained")
    axes = chart.subplots()
    for kind, label in (("tree", "trees of 8 nodes"), ("chain", "chains of 4")):
        heights = [figures[f"{kind}_length_{point}"] for point in points]
        axes.plot(points, heights, marker="o", label=label)
        for point, height in zip(points, heights, strict=True):
            axes.annotate(f"{height:.2f}", (point, height), (0, 5), textcoords="offset points", fontsize=8)
    axes.axvline(BUDGET_TOKENS, color="gray", linewidth=0.8, linestyle="--", label="15 minutes on two cores")
    axes.set_xscale("log", base=2)
    axes.set_xticks(points, [f"{point:,}" for point in points])
    axes.set_xlabel("own tokens that the head was made from")
    axes.set_ylabel("tokens a step")
    axes.set_ylim(bottom=1.0)
    axes.legend(fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    _save(chart, path)


def _save(chart: Figure, path: Path) -> None:
    # a fixed salt and no date: equal figures give an equal file; text stays text, so that a test can read it
    with matplotlib.rc_context({"svg.hashsalt": "rlhfspec", "svg.fonttype": "none"}):
        chart.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"
TABLE_MARKS = ("<!-- tables: python -m benchmarks.pages -->", "<!-- end of tables -->")
MARKS = ("<!-- figures: python -m benchmarks.pages -->", "<!-- end of figures -->")
HEADLINE_MACHINE, GPU = "intel-xeon-2c", "h100"


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
    """Return the README's table of six rows."""

    def row(what: str, name: str, text: str, machine: str = HEADLINE_MACHINE) -> str:
        command = f"`rlhfspec bench {name}`" if machine == HEADLINE_MACHINE else "`docs/cuda.md`"
        provenance = load_results(name)[machine]["provenance"]
        processor = provenance.get("device") or provenance["cpu_model"]
        where = f"{provenance['commit']}, {processor.replace('(R)', '').removesuffix(' Processor')}"
        return f"| {what} | {text} | {command} | {where} |"

    exact, engine, drafting, migration = (
        load_results(name)[HEADLINE_MACHINE]["figures"]
        for name in ("exactness", "engine", "drafting", "migration")
    )
    gpu = load_results("device_ops")[GPU]
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
        row(
            f"8B shape, {gpu['provenance']['date']}: decode step, bound, tree of 16, ms",
            "device_ops",
            "; ".join(
                f"{gpu['figures'][f'step_ms_8b_{name}']:.1f}" for name in ("plain_b1", "bound", "tree16_b1")
            ),
            GPU,
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
        provenance.get("device") or provenance["cpu_model"],
        provenance.get("num_cores", ""),
        provenance.get("num_threads", provenance.get("omp_num_threads") or ""),
        provenance["commit"],
        str(provenance["date"])[:10],
    )
    return f"| {' | '.join(str(word) for word in words)} |"
