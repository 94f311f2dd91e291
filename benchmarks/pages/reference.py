"""The reference pages, written from the code: `python -m rlhfspec.benchmarks.pages.reference` writes `docs/reference/`.

`docs/reference/models.md` is not among them: `rlhfspec bench models` finds it out by trying.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ...cluster.cli import build_parser
from ...cluster.folder import layout
from ...core import errors
from ...core.config import Config
from ...core.metrics import LIVE, METRICS, exported_name
from ...core.settings.section import Section
from ...core.settings.simulated_cluster import SimulatedClusterConfig
from ...core.settings.supervised import DpoConfig, SftConfig, TrainRewardConfig
from ...core.surfaces.surface import TABLES, Surface, surface
from ...integrations.trl_names import THEIR_KEYS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
COMMAND = "python -m rlhfspec.benchmarks.pages.reference"


def pages() -> dict[str, str]:
    """Every reference page by its file's name."""
    made = {
        "commands.md": commands_page(build_parser()),
        "config.md": config_page(
            "Config of a run",
            "For `rlhfspec train`, `check`, `eval` and `profile`. `--set a.b=value` overrides a key.",
            {"Sections": Config},
        ),
        "config-supervised.md": config_page(
            "Config of supervised training",
            "For `rlhfspec sft`, `rlhfspec train-reward` and `rlhfspec dpo`.",
            {
                "rlhfspec sft": SftConfig,
                "rlhfspec train-reward": TrainRewardConfig,
                "rlhfspec dpo": DpoConfig,
            },
        ),
        "config-simulator.md": config_page(
            "Config of the simulator",
            "For `rlhfspec simulate cluster`.",
            {"Sections": SimulatedClusterConfig},
        ),
        "metrics.md": metrics_page(),
        "inputs.md": inputs_page(),
        "their-keys.md": their_keys_page(),
        "errors.md": errors_page(),
        "run-folder.md": run_folder_page(),
    }
    return {name: f"{text.rstrip()}\n" for name, text in made.items()}


def _head(title: str, about: str) -> str:
    return f"# {title}\n\n<!-- written by {COMMAND}; a test compares it with the code -->\n{about}\n"


def _table(columns: str, rows: list[str]) -> str:
    return "\n".join([f"| {columns} |", "|---" * (columns.count("|") + 1) + "|", *rows]) + "\n"


# Commands ----------------------------------------------------------------------------------------------------------


def commands_page(parser: argparse.ArgumentParser) -> str:
    """Markdown of every command below a parser: what it does, its arguments."""
    about = "Exit codes: 0 good, 2 bad input (one line says what to fix), 1 failure, 130 interrupted, 143 terminated."
    return "\n".join([_head("Commands", about), *_commands(parser)])


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield f"## {command.prog}\n\n{_with_code(command.description or '')}\n"
                rows = [
                    _argument(one) for one in command._actions if one.dest != "help" and one.nargs != "A..."
                ]
                if rows:
                    yield _table("argument | meaning", rows)
                yield from _commands(command)


def _with_code(text: str) -> str:
    """A help text with its indented lines, which are examples, as code."""
    lines, in_code = [], False
    for line in (*text.splitlines(), ""):
        if line.startswith("  ") != in_code:
            lines.append("```")
            in_code = not in_code
        lines.append(line)
    return "\n".join(lines).rstrip()


def _argument(action: argparse.Action) -> str:
    value = str(action.metavar or "") or "\\|".join(action.choices or ()) or action.dest.upper()
    name = " ".join([*action.option_strings, *([value] if action.nargs != 0 else [])])
    meaning = (action.help or "") % {**vars(action)}
    return (
        f"| `{name}` | {_cell(meaning)}{' (required)' if action.required and action.option_strings else ''} |"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# Inputs ------------------------------------------------------------------------------------------------------------


def inputs_page() -> str:
    """What becomes of every name in others' inputs, by area: a file of tables each, whose first line names it."""
    about = (
        "Every name in an input is used, harmless, or refused; none is passed over in silence. `*` stands for any "
        "further characters, and null is as a name that is not there. *Only* is a name whose listed values ask for "
        "nothing: any other value is refused.\n"
    )
    areas = {
        file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# "): tomllib.loads(
            file.read_text(encoding="utf-8")
        )
        for file in sorted(TABLES.glob("*.toml"))
    }
    contents = ", ".join(f"[{area}](#{area.lower().replace(' ', '-')})" for area in areas)
    texts = [
        f"## {area}\n\n" + "\n".join(_surface(surface(name)) for name in names)
        for area, names in areas.items()
    ]
    return "\n".join([_head("Inputs", about), f"{contents}.\n", *texts])


def _first_upper(text: str) -> str:
    """But for a key, which begins as it is written."""
    return text if "_" in text.split()[0] else text[:1].upper() + text[1:]


def _surface(one: Surface) -> str:
    becomes = {"refuse": "refused", "note": "noted once, and passed over"}[one.unknown]
    rows = [
        *(("used", text, name) for name, text in one.used.items()),
        *(("harmless", text, name) for name, text in one.harmless.items()),
        *((_only(row["values"]), row["otherwise"], name) for name, row in one.only.items()),
        *(("refused", text, name) for name, text in one.refused.items()),
    ]
    together: dict[tuple[str, str], list[str]] = {}
    for kind, text, name in rows:
        together.setdefault((kind, text), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {kind} | {_cell(text)} |" for (kind, text), names in together.items()]
    return (
        f"### {_first_upper(one.title)}\n\nAny other name is {becomes}: {one.advice}.\n\n"
        f"{_table('name | is | why', lines)}"
    )


def _only(values: list[Any]) -> str:
    """A value that is not there asks for nothing either."""
    return f"only {_cell(' or '.join(f'`{json.dumps(value)}`' for value in values) or 'null')}"


# Config ------------------------------------------------------------------------------------------------------------


def config_page(title: str, about: str, roots: Mapping[str, type[Section]]) -> str:
    """Every key below these configs, by their headings; a section that several share is shown once."""
    about = f"{about} Files are YAML, a mapping for each section; an unknown key is an error."
    written: dict[type[Section], str] = {}
    for first, root in roots.items():
        for place, section in _sections(root, ""):
            written.setdefault(section, f"## {place or first}\n\n{_section(section)}")
    return "\n".join([_head(title, about), *written.values()])


def _sections(section: type[Section], place: str) -> Iterator[tuple[str, type[Section]]]:
    """A section and all below it, with the key that each stands at."""
    yield place, section
    for name, field in section.model_fields.items():
        for below, is_list in _nested(field.annotation):
            yield from _sections(below, f"{place}.{name}".strip(".") + ("[]" if is_list else ""))


def _nested(annotation: Any, is_list: bool = False) -> Iterator[tuple[type[Section], bool]]:
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        yield annotation, is_list
    for below in get_args(annotation):
        yield from _nested(below, is_list or get_origin(annotation) in (tuple, list))


def _section(section: type[Section]) -> str:
    meanings = _meanings(section)
    rows = [
        f"| `{name}` | {_values(field)} | {_default(field)} | {_cell(meanings.get(name) or _about(field))} |"
        for name, field in section.model_fields.items()
    ]
    return (
        f"{' '.join((section.__doc__ or '').split())}\n\n{_table('key | values | default | meaning', rows)}"
    )


def _about(field: FieldInfo) -> str:
    """Of a key that is a section of its own: what that one is for."""
    kind = field.annotation
    return (
        (kind.__doc__ or "").partition("\n")[0] if inspect.isclass(kind) and issubclass(kind, Section) else ""
    )


def _meanings(section: type[Section]) -> dict[str, str]:
    """The text below each field, of the class itself and of those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed([one for one in section.__mro__ if issubclass(one, Section) and one is not Section]):
        body = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(body, ast.ClassDef)
        field = ""
        for node in body.body:
            if isinstance(node, ast.AnnAssign):
                field = ast.unparse(node.target)
                found[field] = ""
            elif field and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found[field] += str(node.value.value)
            else:
                field = ""
    return found


def _values(field: FieldInfo) -> str:
    bounds = []
    signs: tuple[tuple[type[Any], str, Callable[[Any], object]], ...] = (
        (Ge, ">=", lambda one: one.ge),
        (Gt, ">", lambda one: one.gt),
        (Le, "<=", lambda one: one.le),
        (Lt, "<", lambda one: one.lt),
    )
    for one in field.metadata:
        bounds += [f"{sign} {_number(value(one))}" for kind, sign, value in signs if isinstance(one, kind)]
    return ", ".join([_kind(field.annotation), *bounds])


def _number(value: object) -> str:
    return "2^63" if value == 2**63 else f"{value:g}" if isinstance(value, float) else str(value)


def _kind(annotation: Any) -> str:
    """The kind of a value in words: choices, `int`, `list of str`, `section`."""
    if annotation is None or annotation is type(None):
        return "null"
    if hasattr(annotation, "__metadata__"):
        return _kind(get_args(annotation)[0])
    origin, below = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(f"`{one}`" for one in below)
    if origin in (tuple, list) and len(below) == 2 and Ellipsis not in below:
        return "[" + ", ".join(map(_kind, below)) + "]"
    if origin in (tuple, list):
        return f"list of {_kind(below[0])}"
    if origin is dict:
        return f"mapping of {_kind(below[1])}"
    if below:
        return " \\| ".join(dict.fromkeys(map(_kind, below)))
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        return "section"
    return {"bool": "`true` \\| `false`"}.get(annotation.__name__, annotation.__name__)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or value is PydanticUndefined:
        return "required"
    if isinstance(value, Section):
        return ""
    if isinstance(value, tuple):
        return (
            "`[" + ", ".join(map(str, value)) + "]`"
            if not any(isinstance(one, Section) for one in value)
            else ""
        )
    return f"`{json.dumps(value) if value is None or isinstance(value, bool) else value}`"


# Their keys --------------------------------------------------------------------------------------------------------


def their_keys_page() -> str:
    """Of each other trainer its keys, ours, and what becomes of keys that have no counterpart; a file each."""
    about = (
        "Which key says here what a key of another trainer says there; what is not listed has no counterpart. `*` "
        "stands for any further characters. [Config](config.md) and [Config of supervised "
        "training](config-supervised.md) have our keys in full.\n"
    )
    texts = [_head("Their key, our key", about)]
    for name in ("trl", "verl", "openrlhf"):
        trainer = tomllib.loads((THEIR_KEYS / f"{name}.toml").read_text(encoding="utf-8"))
        texts.append(f"## {trainer.pop('title')}\n\n{trainer.pop('about')}\n")
        for table in trainer.values():
            commands = ", ".join(f"`rlhfspec {command}`" for command in table["config"])
            rows = [_their_key(name, *ours.split(" | ")) for name, ours in table["keys"].items()]
            texts.append(
                f"### {table['title']}\n\nOurs: {commands}.\n\n{_table('theirs | ours | note', rows)}"
            )
            rows = [
                f"| {', '.join(f'`{name}`' for name in names)} | {_cell(text)} |"
                for text, names in table.get("without", {}).items()
            ]
            texts += [_table("theirs, without a counterpart | why, or what to do", rows)] if rows else []
    return "\n".join(texts)


def _their_key(name: str, ours: str, note: str = "") -> str:
    return f"| `{name}` | {', '.join(f'`{key}`' for key in ours.split(', '))} | {_cell(note)} |"


# Metrics, errors, run folder ---------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Every metric of `metrics.jsonl`, by area, and those that only the metrics port has."""
    about = (
        "One line of `metrics.jsonl` holds an iteration's metrics. At Ray's metrics port (Prometheus) each is the "
        "gauge `ray_rlhfspec_NAME` of the last iteration, with the label `run`: `time/update_s` is "
        f"`ray_rlhfspec_{exported_name('time/update_s')}`. `*` stands for a name of the run's own.\n"
    )
    texts = [_head("Metrics", about)]
    for area in dict.fromkeys(name.partition("/")[0] for name in METRICS):
        rows = [
            f"| `{one.name}` | {one.unit} | {one.kind} | {_cell(one.help)} |"
            for one in METRICS.values()
            if one.name.startswith(f"{area}/")
        ]
        texts.append(f"## {area}\n\n{_table('name | unit | over iterations | meaning', rows)}")
    rows = [
        f"| `{one.series}` | {one.kind} | {one.unit} | {', '.join(one.labels)} | {_cell(one.help)} |"
        for one in LIVE.values()
    ]
    texts.append(f"## Only at the metrics port\n\n{_table('series | kind | unit | labels | meaning', rows)}")
    return "\n".join(texts)


def errors_page() -> str:
    """The tree of errors and what each means."""
    tree = (errors.__doc__ or "").partition("\n\n")[2].partition("\n\nMessages")[0]
    classes = [
        one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.RlhfSpecError)
    ]
    rows = [f"| `{one.__name__}` | {one.exit_code} | {_cell(inspect.getdoc(one) or '')} |" for one in classes]
    about = (
        "A message says what failed, what was expected, what was found, and what to do. "
        "[Errors A to Z](../how-to/errors.md) explains the usual ones.\n\n"
        f"```\n{inspect.cleandoc(tree)}\n```\n"
    )
    return _head("Errors", about) + "\n" + _table("error | exit code | meaning", rows)


def run_folder_page() -> str:
    """What a run leaves behind, from the layout's own docstring."""
    lines = re.findall(
        r"^    RUN/([^\s,{]*(?:\{\S+\})?[^\s,]*(?:, RUN/[^\s,]+)*) +(.+)$", layout.__doc__ or "", re.MULTILINE
    )
    rows = [f"| `{path.replace('RUN/', '')}` | {_cell(meaning)} |" for path, meaning in lines]
    about = "`rlhfspec train` prints the folder first. It is readable at any moment, after a kill too.\n"
    return _head("The run folder", about) + "\n" + _table("file | content", rows)


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
