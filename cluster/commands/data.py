"""`rlhfspec data check`: what a data set holds, as the model would see it; faults with file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .arguments import set_flag
from .declare import Arg

if TYPE_CHECKING:
    from ...core.config import Config
    from ...learning.data.statistics import DataReport

ABOUT = """What a data set holds, and what is wrong with it (data check).

Look at data before a run does.

  rlhfspec data check train.jsonl --tokenizer Qwen/Qwen3-0.6B
"""

_MAX_KINDS = 10
_SHOWN_CHARS = 600
_NO_MODEL = "demo"
"Made on the spot by a run, so it has no tokenizer that could be loaded here."


def check_data(
    file: Annotated[str, Arg("FILE", "instead of the config's data.path")] | None = None,
    *,
    config: Annotated[Path, Arg("FILE", "YAML file with the data section")] | None = None,
    overrides: Annotated[list[str], set_flag("override one key, such as data.prompt_field=text")],
    tokenizer: Annotated[
        str, Arg("NAME", "path or hub name; else the config's, else lengths are in characters")
    ]
    | None = None,
) -> int:
    """Counts, faults with file and line, three prompts as the model sees them.

    Read a data set as a run would, and print rows, lengths, what is left out, faults and three prompts.

      rlhfspec data check train.jsonl                          lengths in characters
      rlhfspec data check 'shards/*.parquet' --tokenizer DIR --set data.chat=true
      rlhfspec data check --config run.yaml                    the data of a config

    FILE is what data.path may be: a file, a pattern, a folder, or the name of a `datasets` data set.
    Exit code 2 where a run would stop: a malformed row, a missing field, an empty or too long prompt.
    """
    from ...core.errors import DataError
    from ..observe.console import PipeConsole, Reporter

    # the report alone goes to standard output
    with Reporter(PipeConsole(highlight=False, soft_wrap=True, stderr=True)) as report:
        read = _config(file, config, overrides)
        name, loaded = tokenizer or read.models.tokenizer or read.models.target, None
        if name != _NO_MODEL:
            report.stage("loading the tokenizer")
            from ..plan.inputs import read_tokenizer
            from ..plan.names import resolve_models

            models = read.models.model_copy(update={"target": name, "draft": None, "tokenizer": name})
            resolved = resolve_models(read.model_copy(update={"models": models}), report)
            loaded = read_tokenizer(resolved.models, resolved.run.template_time)
        from ...learning.data.statistics import DataReport

        report.stage("reading the data")
        found = DataReport(read.data, loaded, seed=read.run.seed)
    print("\n".join(_lines(found)))
    if found.num_faults or not found.num_prompts:
        first = next((first for _, first in found.faults.values()), "no prompt is left of it")
        raise DataError(f"{found.name}: {found.num_faults:,} faults; the first: {first}")
    return 0


def _config(file: str | None, config: Path | None, overrides: list[str]) -> Config:
    from ...core.config_io import apply_overrides, config_from_dict, load_config, read_sections
    from ...core.errors import ConfigError

    if file is None:
        if config is None:
            raise ConfigError("name what to check: rlhfspec data check FILE, or --config FILE")
        return load_config(config, overrides)
    pair = {"models": {"target": _NO_MODEL, "draft": _NO_MODEL}}  # a config needs models, and these data none
    tree = pair if config is None else read_sections(config)
    kept = tree.get("data", {})
    tree["data"] = {key: kept[key] for key in kept.keys() - {"task", "sources"}} | {"path": file}
    return config_from_dict(apply_overrides(tree, overrides), origin=str(config or "--set"))


def _lines(report: DataReport) -> Iterator[str]:
    yield f"{report.name}: {report.num_rows:,} rows, {report.num_prompts:,} prompts"
    lengths = sorted(report.lengths)
    if lengths:
        middle = lengths[len(lengths) // 2]
        yield f"{report.unit:<12}min {lengths[0]:,}, median {middle:,}, max {lengths[-1]:,}"
    if out := report.left_out.describe():
        yield f"left out    {out}"
    yield from (f"note        {note}" for note in report.remarks())
    for row, text, length in report.samples:
        yield f"\n--- {row.origin}, {length} {report.unit}, as the model sees it\n{_shown(text)}"
        if row.reference:
            yield f"--- reference: {_shown(row.reference)}"
    if report.faults:
        yield f"\nfaults: {report.num_faults:,} of {len(report.faults):,} kinds, the first of each"
        yield from (f"  {count:,} x {first}" for count, first in [*report.faults.values()][:_MAX_KINDS])
        if len(report.faults) > _MAX_KINDS:
            yield f"  and {len(report.faults) - _MAX_KINDS:,} kinds more"


def _shown(text: str) -> str:
    if len(text) <= _SHOWN_CHARS:
        return text
    half = _SHOWN_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
