"""`rlhfspec data check`: what a data set holds, as the model would see it; faults with file and line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .arguments import set_flag
from .declare import Arg

if TYPE_CHECKING:
    from ...core.config import Config
    from ..observe.console import Reporter

ABOUT = """What a data set holds, and what is wrong with it (data check).

Look at data before a run does.

  rlhfspec data check train.jsonl --tokenizer Qwen/Qwen3-0.6B
"""

_BAR_AFTER_S = 2.0
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
    as_json: Annotated[bool, Arg(help="print the report as one JSON object", flag="--json")] = False,
) -> int:
    """Statistics, faults with file and line, three prompts as the model sees them.

    Read a data set as a run would, and print rows, fields, roles, lengths, duplicates, faults and three prompts.

      rlhfspec data check train.jsonl                          lengths in characters
      rlhfspec data check 'shards/*.parquet' --tokenizer DIR --set data.chat=true
      rlhfspec data check --config run.yaml --json             the data of a config, for programs

    FILE is what data.path may be: a file, a pattern, a folder, or the name of a `datasets` data set.
    Exit code 2 where a run would stop: a malformed row, a missing field, an empty or too long prompt.
    """
    from ...core.errors import DataError
    from ..observe.console import PipeConsole, Reporter

    # the report alone goes to standard output
    with Reporter(PipeConsole(highlight=False, soft_wrap=True, stderr=True)) as report:
        read = _config(file, config, overrides)
        from ..observe.data_text import data_lines

        name, loaded = tokenizer or read.models.tokenizer or read.models.target, None
        if name != _NO_MODEL:
            report.stage("loading the tokenizer")
            from ..plan.inputs import read_tokenizer
            from ..plan.names import resolve_models

            models = read.models.model_copy(update={"target": name, "draft": None, "tokenizer": name})
            resolved = resolve_models(read.model_copy(update={"models": models}), report)
            loaded = read_tokenizer(resolved.models, resolved.run.template_time)
        from ...learning.data.statistics import data_report

        report.stop()
        with _late_bar(report, "reading") as tick:
            found = data_report(read.data, loaded, seed=read.run.seed, tick=tick)
    print(json.dumps(found.to_dict(), indent=2) if as_json else "\n".join(data_lines(found)))
    if found.num_faults or not found.num_prompts:
        first = f"{found.faults[0]}" if found.faults else "no prompt is left of it"
        raise DataError(f"{found.name}: {found.num_faults:,} faults; the first: {first}")
    return 0


def _config(file: str | None, config: Path | None, overrides: list[str]) -> Config:
    from ...core.config_io import config_from_dict, load_config, read_tree
    from ...core.errors import ConfigError

    if file is None:
        if config is None:
            raise ConfigError("name what to check: rlhfspec data check FILE, or --config FILE")
        return load_config(config, overrides)
    pair = {"models": {"target": _NO_MODEL, "draft": _NO_MODEL}}  # a config needs models, and these data none
    tree = pair if config is None else read_tree(config)
    data = tree.get("data")
    kept = {
        key: value
        for key, value in (data.items() if isinstance(data, dict) else ())
        if key not in ("task", "sources")
    }
    tree["data"] = kept | {"path": file}
    return config_from_dict(tree, overrides=overrides, origin=str(config or "--set"))


@contextmanager
def _late_bar(report: Reporter, title: str) -> Iterator[Callable[[str, float], None]]:
    """A bar that appears where the work takes more than two seconds."""
    with ExitStack() as bars:
        started, ticks = time.monotonic(), list[Callable[[str, float], None]]()

        def tick(stage: str, fraction: float) -> None:
            if not ticks and time.monotonic() - started > _BAR_AFTER_S:
                ticks.append(bars.enter_context(report.job(title)))
            for show in ticks:
                show(stage, fraction)

        yield tick
