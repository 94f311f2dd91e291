"""Which model families run: each one's small model decodes, and is judged by its own plain forwards.

Writes `models.md`, which `docs/reference/models.md` is a copy of. Quick: a dozen families. Each is tried in a process
of its own; a crash is a finding. Returns 1 when anything is wrong in silence, raises what is no error of ours, or
touches memory it does not own.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence

import transformers

from ..support.harness import Bench
from .configs import all_families, quick_families
from .trial import TOLERANCE, Finding, try_families

GOOD = ("exact", "fast only", "refused", "not built")
"Outcomes that a page may have; any other is a fault of the engine."

_HEAD = """\
# Which models run

Every family of models for text generation that transformers {version} has, tried from a small model of random weights:
{counts}.
Find your model's `model_type` (it stands in its `config.json`) in the table.

- **exact**: it runs, and by default (CPU, one thread an instance, the extra `cpu`, which `make setup` installs) every
  token and log-probability is the same bit for bit, whatever is drafted, batched or moved. With several threads, on a
  GPU, or with `engine.numerics: fast`, it runs as those of the next kind do. Without the extra a start-up probe tells.
- **fast only**: it runs with `engine.numerics: fast`. Tokens follow the model's own distribution, but what is computed
  beside a sample may change a logit's last bits, and so, rarely, a token. By default an error says this.
- **refused**: it does not run. A clear error ends the start, and nothing is sampled.
- **not built**: transformers made no small model of it here, so nothing is known of it.

How it was tried (float32, CPU): samples were decoded plainly, by chains, trees and look-ups, alone and in batches,
with guard pages around the caches of keys and values. The judge is a plain forward of the stock model in another copy:
every token is the one that the sampling rule gives there, up to near ties; log-probabilities are within {tolerance}.
A note behind a comma says what its config has that is special. A row tells of a family, not of every config and every
checkpoint: a model that runs as the stock module, in the table or not, is compared with its plain forward at each
start. Llama, Mistral, Qwen2 and Qwen3 start as our own model, with no module to compare with; `rlhfspec verify` builds
one of yours and compares.

Made by `rlhfspec bench models --out DIR`, which writes this page to `DIR/models.md`.

| family (`model_type`) | outcome | why |
|---|---|---|
"""
_KNOWN = {
    "gemma3n": "needs the package timm; its text part, gemma3n_text, runs",
    "gemma4_assistant": "a helper that reads another model's keys and values",
    "gemma4_unified_assistant": "a helper that reads another model's keys and values",
    "musicgen": "transformers needs its decoder's config",
    "musicgen_melody": "transformers needs its decoder's config",
}
"Why a model is not built, in words better than the error's."


def page(findings: Sequence[Finding], *, version: str, tolerance: float) -> str:
    """Return the page's text."""
    count = Counter(finding.outcome for finding in findings if "," not in finding.name)
    counts = ", ".join(
        f"{count[outcome]} {outcome}"
        for outcome in (*GOOD, *sorted(set(count) - set(GOOD)))
        if count[outcome]
    )
    head = _HEAD.format(version=version, counts=counts, tolerance=f"{tolerance:g}")
    return head + "".join(f"| {' | '.join(row(finding))} |\n" for finding in findings)


def row(finding: Finding) -> tuple[str, str, str]:
    """Return one family's row: name, outcome, why; the same on every run."""
    return finding.name, finding.outcome, _why(finding)


def rows_of(text: str) -> dict[str, tuple[str, str, str]]:
    """Return a page's rows by name."""
    cells = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*?) ?\|$", text.split("|---|", 1)[1], re.MULTILINE)
    return {cell[0]: cell for cell in cells}


def _why(finding: Finding) -> str:
    if finding.outcome == "exact":
        return ""
    if finding.outcome == "fast only":
        product = re.search(r"(\S+) is multiplied by outside", finding.reason)
        return (
            f"multiplies by `{product[1]}` outside linear layers"
            if product
            else "rounds by what is computed beside it"
        )
    if finding.outcome == "not built" and finding.name in _KNOWN:
        return _KNOWN[finding.name]
    reason = re.sub(r"^\w+Error: ", "", finding.reason)
    reason = re.sub(r"^(a '\S+' model|\w+) is not supported: ", "", reason)
    reason = re.sub(r"; take a model of another family$", "", reason)
    reason = re.sub(r" \(total variation [^)]*\)", "", reason)
    reason = re.sub(
        r"^layer \d+ attends with .*",
        "its keys and values are not of the one shape that its config says",
        reason,
    )
    return reason.replace("|", "/")


def run(bench: Bench) -> int:
    """Run the trial; returns 1 when a family is wrong, raises or corrupts memory."""
    console, started = bench.console, time.perf_counter()

    def told(finding: Finding) -> None:
        console.print(
            f"{finding.name}: {finding.outcome} ({finding.seconds:.0f} s) {finding.reason}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    findings = try_families(quick_families() if bench.is_quick else all_families(), told=told)
    count = Counter(finding.outcome for finding in findings)
    figures = {outcome.replace(" ", "_"): float(count[outcome]) for outcome in {*GOOD, *count}}
    figures |= {
        "logprob_max_abs_error": max(finding.logprob_error for finding in findings),
        "tokens": float(sum(finding.tokens for finding in findings)),
        "near_ties": float(sum(finding.near_ties for finding in findings)),
        "accepted_draft_tokens": float(sum(finding.accepted for finding in findings)),
        "seconds": time.perf_counter() - started,
    }
    (bench.out / "models.md").write_text(
        page(findings, version=transformers.__version__, tolerance=TOLERANCE)
    )
    bench.figures.values |= figures
    bench.write()
    bad = [finding for finding in findings if finding.outcome not in GOOD]
    for finding in bad:
        console.print(f"{finding.name}: {finding.outcome}: {finding.reason}\n{finding.trace}", markup=False)
    return 1 if bad else 0
