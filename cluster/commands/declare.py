"""Commands are typed functions; here they become a command line and its help.

    def replay(
        log: Annotated[Path, Arg("FILE", "a step log")],
        *,
        sample: Annotated[int, Arg("N", "the sample with this index")] | None = None,
    ) -> int:
        '''Check a step log's decisions.

        What `rlhfspec replay --help` says; the line above stands in the list of all commands.
        '''

A parameter before the `*` is positional, one behind it a flag of its name; a default makes it optional. By its type:
`bool` is a switch, `list[T]` a flag that may be repeated, `Sequence[T]` one that takes several values, a `Literal` a
choice, and of a `Path` the `~` is resolved. The function returns the exit code; what it raises, `main` explains.
"""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...core.outside import user_path

Command = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Arg:
    """What the command line says of a parameter."""

    metavar: str | None = None
    help: str | None = None
    flag: str | None = None
    "where it is not named as the parameter"
    parse: Callable[[str, str], Any] | None = None
    "from the flag and its text to the value, where the type does not say it; it raises ConfigError"
    bare: Any = None
    "the value of a flag that is given without one"
    group: str | None = None
    "of flags that exclude each other; where they have no default, one of them is required"


@dataclass(frozen=True, slots=True)
class Group:
    """Commands below a word, such as `models make`."""

    about: str
    "as a command's docstring: a line for the list of commands, and the text of its help"
    commands: Mapping[str, Command]
    command: Command | None = None
    "what the word alone does"


def add_commands(to: Any, table: Mapping[str, Command | Group], named: Container[str] | None = None) -> None:
    """Add a table's commands to what `add_subparsers` returned; arguments only of those `named`, None: of all."""
    for word, entry in table.items():
        about = entry.about if isinstance(entry, Group) else entry.__doc__ or ""
        summary, _, text = inspect.cleandoc(about).partition("\n\n")
        parser = to.add_parser(
            word,
            help=(summary[0].lower() + summary[1:]).rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if named is not None and word not in named:
            continue
        if (command := entry.command if isinstance(entry, Group) else entry) is not None:
            add_arguments(parser, command)
        if isinstance(entry, Group):
            actions = parser.add_subparsers(title="actions", metavar="ACTION", required=command is None)
            add_commands(actions, entry.commands, named)


def add_arguments(parser: argparse.ArgumentParser, command: Command) -> None:
    """Add a command's parameters; what is parsed then goes to `call`."""
    parser.set_defaults(command=command)
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if get_origin(hint) in (Union, types.UnionType):  # ... | None
            hint = get_args(hint)[0]
        kind, arg = get_args(hint)
        flag = arg.flag or "--" + parameter.name.replace("_", "-")
        options = _options(kind, arg, flag)
        has_default = parameter.default is not parameter.empty
        if has_default:
            options.setdefault("default", parameter.default)
        if parameter.kind is not parameter.KEYWORD_ONLY:
            if has_default:
                options["nargs"] = "?"
            parser.add_argument(parameter.name, **options)
        elif arg.group is None:
            options["required"] = not has_default and "default" not in options
            parser.add_argument(flag, dest=parameter.name, **options)
        else:
            if arg.group not in groups:
                groups[arg.group] = parser.add_mutually_exclusive_group(required=not has_default)
            groups[arg.group].add_argument(flag, dest=parameter.name, **options)


def _options(kind: Any, arg: Arg, flag: str) -> dict[str, Any]:
    """What argparse is told of a parameter's type."""
    if kind is bool:
        return {"action": "store_true", "default": False, "help": arg.help}
    options: dict[str, Any] = {"help": arg.help, "metavar": arg.metavar}
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return options | {"choices": inner}
    if origin is list:
        options |= {"action": "append", "default": []}
    elif origin is Sequence:
        options["nargs"] = "+"
    elif arg.bare is not None:
        options |= {"nargs": "?", "const": arg.bare}
    if inner:
        (kind, *_) = inner
    parse = arg.parse
    if parse is not None:
        return options | {"type": lambda text: parse(flag, text)}
    return options | {"type": user_path if kind is Path else kind}


def call(args: argparse.Namespace) -> int:
    """Run the command that was parsed and return its exit code."""
    names = inspect.signature(args.command).parameters
    return args.command(**{name: getattr(args, name) for name in names})
