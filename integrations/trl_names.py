"""What TRL's keys, arguments and objects are called here, told to whoever hands them to `rlhfspec.GRPO` and its kin."""

from __future__ import annotations

import dataclasses
import functools
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from ..core.errors import ConfigError
from ..core.outside import cut

THEIR_KEYS = Path(__file__).with_name("their_keys")
"A table of each other trainer's keys, which docs/reference/their-keys.md shows."
Class = TypeVar("Class", bound=type)


def our_words(name: str, command: str, *, distills: bool = False) -> str | None:
    """What a key or an argument of TRL's is called in a config of the command, or why it has none; None: not TRL's."""
    said: dict[str, str] = {}
    tables = tomllib.loads((THEIR_KEYS / "trl.toml").read_text(encoding="utf-8"))
    for table in filter(lambda one: isinstance(one, dict), tables.values()):
        # a teacher's beta is another than GRPO's
        if command in table["config"] and (distills or table.get("theirs") != ["DistillationConfig"]):
            said |= {key: ours.replace(" | ", " - ") for key, ours in table["keys"].items()}
            for why, keys in table.get("without", {}).items():
                said |= dict.fromkeys(keys, f"no key here - {why}")
    return said.get(name) or next((words for key, words in said.items() if fnmatchcase(name, key)), None)


def require_our_keys(given: Any, sections: Iterable[str], words: Callable[[str], str | None]) -> None:
    """Raise one ConfigError for all keys of TRL's, and for what is no dict, with what each is called here."""
    known, got, odd = [*sections, "reward_weights"], type(given).__name__, list[str]()
    if isinstance(given, Mapping):
        odd = [str(name) for name in given if "." not in str(name) and name not in known]
        if not any(map(words, odd)):
            return
        got = f"{len(odd)} others"
    elif dataclasses.is_dataclass(given):  # TRL's config: what it sets otherwise than its class
        odd = [one.name for one in dataclasses.fields(given) if getattr(given, one.name) != one.default]
    said = [f"{cut(name)} is {words(name) or 'no key of TRL either'}" for name in odd]
    raise ConfigError(
        f'args: expected a dict of dotted keys such as {{"trainer.learning_rate": 1e-6}}, or the path of a YAML file; '
        f"keys begin with {', '.join(known)}; got {got}{': ' if said else ''}{' | '.join(said)}"
    )


def name_of_model(given: Any, parameter: str) -> str:
    """A model's path or name. Raises ConfigError for a model, or what else is none."""
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    raise ConfigError(
        f"{parameter}: expected a path or a name of a model, got a {type(given).__name__}; give the name that it was "
        "loaded by, or save it and its tokenizer with save_pretrained(FOLDER) and give the folder"
    )


def naming_trls_arguments(made: Class) -> Class:
    """Of a class the same: TRL's arguments are refused by a line that says what they are called here."""
    plain = made.__init__

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        odd = {name: self._words(name) for name in given if name not in made.__dataclass_fields__}
        if lines := [f"{name} is {words}" for name, words in odd.items() if words]:
            raise ConfigError(f"{type(self).__name__} takes keys in args: " + " | ".join(lines))
        plain(self, *args, **given)

    made.__init__ = __init__
    return made
