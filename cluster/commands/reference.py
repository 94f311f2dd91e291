"""The reference page of all commands: `python -m rlhfspec.cluster.commands.reference > docs/reference-commands.md`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

_HEAD = """\
# Commands

Written by `python -m rlhfspec.cluster.commands.reference` from the commands' own declarations; a test compares them.
Exit codes: 0 good, 2 bad input (one line says what to mend), 1 failure, 130 interrupted.
"""


def page(parser: argparse.ArgumentParser) -> str:
    """Markdown of every command below a parser: what it does, its arguments."""
    return "\n".join([_HEAD, *_commands(parser)])


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield f"## {command.prog}\n\n{_with_code(command.description or '')}\n"
                rows = [_row(one) for one in command._actions if one.dest != "help" and one.nargs != "A..."]
                if rows:
                    yield "\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n"
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


def _row(action: argparse.Action) -> str:
    value = str(action.metavar or "") or "\\|".join(action.choices or ()) or action.dest.upper()
    name = " ".join([*action.option_strings, *([value] if action.nargs != 0 else [])])
    meaning = (action.help or "") % {**vars(action)}
    return f"| `{name}` | {meaning}{' (required)' if action.required and action.option_strings else ''} |"


if __name__ == "__main__":
    from rlhfspec.cluster.cli import build_parser

    print(page(build_parser()), end="")
