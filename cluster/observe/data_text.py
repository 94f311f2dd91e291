"""The report of `rlhfspec data check` as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...learning.data.statistics import DataReport, Lengths

_BAR = 40
_SHOWN_CHARS = 600


def data_lines(report: DataReport) -> Iterator[str]:
    """Yield the report line by line."""
    yield f"{report.name}: {report.num_rows:,} rows, {report.num_prompts:,} prompts"
    if report.fields:
        yield f"fields      {_counted(report.fields, report.num_rows)}"
    if report.conversations:
        turns = ", ".join(f"{role} {count:,}" for role, count in report.roles.items())
        yield f"roles       {turns} turns in {report.conversations:,} conversations"
    if report.rewritten:
        yield (
            f"rewritten   {report.rewritten:,} conversations: the chat template cuts white space of a system's or "
            "user's turn, changes it or leaves it out"
        )
    left_out = {
        "duplicates": report.duplicates,
        "too long": report.too_long,
        "too short": report.too_short,
        "empty": report.empty,
        "refused by data.filter": report.filtered,
        "faults": report.num_faults,
    }
    yield "counted     " + ", ".join(f"{count:,} {name}" for name, count in left_out.items())
    if report.lengths is not None:
        yield from _length_lines(report.lengths, report.unit)
    for note in report.notes:
        yield f"note        {note}"
    for sample in report.samples:
        size = "" if sample.num_tokens is None else f", {sample.num_tokens} tokens"
        yield ""
        yield f"--- {sample.origin}{size}, as the model sees it"
        yield _shown(sample.text)
        if sample.last_tokens:
            shown = ", ".join(f"{token} {text!r}" for token, text in sample.last_tokens)
            yield f"--- last ids: {shown}"
        if sample.reference:
            yield f"--- reference: {_shown(sample.reference)}"
    if report.faults:
        yield ""
        more = f", the first {len(report.faults)}" if report.num_faults > len(report.faults) else ""
        yield f"faults ({report.num_faults:,}{more})"
        yield from (f"  {fault}" for fault in report.faults)


def _length_lines(lengths: Lengths, unit: str) -> Iterator[str]:
    yield f"{unit:<12}p50 {lengths.p50:,}, p90 {lengths.p90:,}, p99 {lengths.p99:,}, max {lengths.max:,}"
    most = max(lengths.counts)
    for index, count in enumerate(lengths.counts):
        first, last = lengths.edges[index], lengths.edges[index + 1] - 1
        name = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        bar = "#" * max(round(_BAR * count / most), bool(count))
        yield f"  {name:>18}  {bar:<{_BAR}}  {count:,}"


def _counted(fields: Mapping[str, int], num_rows: int) -> str:
    return ", ".join(
        name if count == num_rows else f"{name} (in {count:,} rows)" for name, count in fields.items()
    )


def _shown(text: str) -> str:
    if len(text) <= _SHOWN_CHARS:
        return text
    half = _SHOWN_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
