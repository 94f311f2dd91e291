"""Writes `docs/benchmarks/` and the README's figures from `benchmarks/results/`: `python -m benchmarks.pages`.

A page has one row a figure and one column a machine; the README has five rows between two marks, each with its
command, commit and processor. A test fails where either differs from the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
MARKS = ("<!-- figures: python -m benchmarks.pages -->", "<!-- end of figures -->")
HEADLINE_MACHINE = "intel-xeon-2c"
BATCHES = (1, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a page says above its table."""

    title: str
    question: str
    how: str
    data: bool = False
    "whether it takes real prompts"


ABOUT = {
    "exactness": About(
        title="Exactness",
        question="Do tokens or log-probabilities depend on what was drafted, batched or moved?",
        how="Plain decoding alone is compared bit for bit with chains, trees, n-gram drafts and the adaptive policy, "
        "under other batch sizes and orders of admission, in float32 and bfloat16, and on two Ray actors; then with a "
        "teacher-forced Hugging Face forward (`reference_mismatches`, `logprob_max_abs_error`). A near tie is a place "
        "where rounding could change the sampled token.",
        data=True,
    ),
    "engine": About(
        title="Engine",
        question="How fast is decoding with fixed plans, beside other engines and beside plain decoding?",
        how="One thread each, float32. `plain_over_X` is our plain decoding over engine X on a random Llama (8 layers "
        "of 512, vocabulary 4,096, greedy, 64 prompt and 128 new tokens). `spec_over_plain` and `spec_over_hf` are "
        "the best fixed plan on the demo pair (8 layers of 256, draft 1 layer of 96, temperature 1, long-tailed "
        "lengths) over our plain decoding and over `generate`; `_weak` and `_useless` name worse drafts, `_bN` the "
        "batch. `paged_*`: 64 long-tailed samples in the memory of 4 full slots.",
    ),
    "drafting": About(
        title="Adaptive drafting",
        question="How good is the adaptive policy beside every fixed plan, and beside an oracle?",
        how="Constant batches and whole rollouts of 64 long-tailed samples; the demo pair, and `_large` with a target "
        "twice as deep. The best fixed plan is found afterwards. The oracle knows each drafter state's best number of "
        "nodes; the policy gives each sample its own number and may exceed it.",
        data=True,
    ),
    "migration": About(
        title="Migration",
        question="What does moving a running sample cost, and does it change anything?",
        how="Two instances on two cores. Random moves are forced on whole rollouts and their tokens compared with the "
        "run without; then single moves of contexts of some 480 tokens are timed (a target of 29M parameters). "
        "Downtime is counted in decode steps of the destination; `_plain` is without speculation. `gate_*`: whether "
        "shipping or prefilling again was chosen rightly, over 24 cells of contexts, pairs and bandwidths.",
    ),
    "rollout": About(
        title="Reallocation in rollouts",
        question="What do moves win over static placement, over pull, and over the paper's rule?",
        how="A pair with 16 layers, 256 samples of up to 900 tokens, lengths that no policy knows. `skewed`: the "
        "longest half on one instance; `resident`: every sample has a slot. While requests are queued, freed slots "
        "refill at once and moves rarely trigger; on these CPUs an instance with fewer than some 16 "
        "samples is no faster, so "
        "little can be won. Single rollouts vary by a tenth.",
    ),
    "profile": About(
        title="Profile",
        question="How good are the fitted cost and acceptance models on data they have not seen?",
        how="Costs are fitted on timed decode steps, acceptance on recorded drafts; errors are on held-out data.",
        data=True,
    ),
}


def load_results(name: str) -> dict[str, dict[str, Any]]:
    """Return a benchmark's result files by machine."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"*/{name}.json"))}


def page(name: str) -> str:
    """Return the text of a benchmark's page."""
    about, results = ABOUT[name], load_results(name)
    figures = list(dict.fromkeys(figure for result in results.values() for figure in result["figures"]))
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
        "Ratios are named `a_over_b`, above 1 when `a` is better; in brackets the 95% interval, where there is one.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(
            f"| `{figure}` | {' | '.join(_cell(result, figure) for result in results.values())} |"
            for figure in figures
        ),
        "",
        "| machine | processor | cores | threads | commit | date |",
        "|---|---|---|---|---|---|",
        *(_machine_row(machine, result["provenance"]) for machine, result in results.items()),
    ]
    return "\n".join(lines) + "\n"


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


def draw_speedup(path: Path) -> None:
    """Draw speed over batch size on the headline machine: plain decoding and the best plan, over `generate`."""
    matplotlib.use("Agg")
    # a fixed salt and no date: equal figures give an equal file
    matplotlib.rcParams["svg.hashsalt"] = "rlhfspec"
    from matplotlib import pyplot as plt

    figures: Mapping[str, float] = load_results("engine")[HEADLINE_MACHINE]["figures"]
    best = [figures[f"spec_over_hf_b{batch}"] for batch in BATCHES]
    plain = [figures[f"spec_over_hf_b{batch}"] / figures[f"spec_over_plain_b{batch}"] for batch in BATCHES]
    places = range(len(BATCHES))
    chart, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
    for shift, heights, label in ((-0.2, plain, "plain decoding"), (0.2, best, "speculation, same tokens")):
        bars = axes.bar([place + shift for place in places], heights, width=0.38, label=label)
        axes.bar_label(bars, fmt="%.1fx", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="Hugging Face generate")
    axes.set_xticks(list(places), [f"batch {batch}" for batch in BATCHES])
    axes.set_ylabel("rollout speed-up")
    axes.legend(fontsize=8, loc="upper left")
    axes.set_ylim(0, max(best) * 1.25)
    axes.spines[["top", "right"]].set_visible(False)
    chart.savefig(path, metadata={"Date": None})
    plt.close(chart)


def _command(name: str) -> str:
    return f"rlhfspec bench {name} --out bench" + (" --data gsm8k_train.jsonl" if ABOUT[name].data else "")


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


def main() -> None:
    """Write every page, the README's rows and the picture."""
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in ABOUT:
        (PAGES / f"{name}.md").write_text(page(name))
    draw_speedup(PAGES / "speedup.svg")
    README.write_text(with_figures(README.read_text()))


if __name__ == "__main__":
    main()
