"""Which model families run: each one's small model decodes, and is judged by its own plain forwards.

Writes `models.md`, the page that `docs/models.md` is a copy of. Quick: a dozen families. Each is tried in a process of
its own; a crash is a finding. Returns 1 when anything is wrong in silence, raises what is no error of ours, or touches
memory it does not own.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import transformers

from benchmarks.families.page import GOOD, page
from benchmarks.families.trial import TOLERANCE, Finding
from benchmarks.families.variants import all_families, quick_families
from benchmarks.families.workers import try_families
from benchmarks.support.result import write_result
from rlhfspec.cluster.observe.console import PipeConsole


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the trial; returns 1 when a family is wrong, raises or corrupts memory."""
    console, started = PipeConsole(), time.perf_counter()

    def told(finding: Finding) -> None:
        console.print(
            f"{finding.name}: {finding.outcome} ({finding.seconds:.0f} s) {finding.reason}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    findings = try_families(quick_families() if mode == "quick" else all_families(), told=told)
    count = Counter(finding.outcome for finding in findings)
    figures = {outcome.replace(" ", "_"): float(count[outcome]) for outcome in {*GOOD, *count}}
    figures |= {
        "logprob_max_abs_error": max(finding.logprob_error for finding in findings),
        "tokens": float(sum(finding.tokens for finding in findings)),
        "near_ties": float(sum(finding.near_ties for finding in findings)),
        "accepted_draft_tokens": float(sum(finding.accepted for finding in findings)),
        "seconds": time.perf_counter() - started,
    }
    (out / "models.md").write_text(page(findings, version=transformers.__version__, tolerance=TOLERANCE))
    write_result(out, "models", figures, provenance={"mode": mode})
    console.print(figures)
    bad = [finding for finding in findings if finding.outcome not in GOOD]
    for finding in bad:
        console.print(f"{finding.name}: {finding.outcome}: {finding.reason}\n{finding.trace}", markup=False)
    return 1 if bad else 0
