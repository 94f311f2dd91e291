"""What becomes of each key of another trainer's config, and the account of it.

A trainer's table (`*.toml`) says of each of their keys either where its value goes, or why nothing corresponds to it;
what several keys say together is decided by a function. No key is dropped: what no table knows is named too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rlhfspec.core.config import Config
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.outside import cut
from rlhfspec.core.settings.section import Section
from rlhfspec.core.settings.supervised import SftConfig, TrainRewardConfig

Given = Mapping[str, Any]
Decide = Callable[..., Mapping[str, Any]]


class Unmatched(Exception):
    """A value that has no counterpart here; the text says why, and what to set instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of run of another trainer, as its table (`*.toml`) has it."""

    name: str
    command: str
    "of ours, which runs the result"
    rules: Given
    "their key -> {to, as}: our key and a row of `CHANGES`, or a table of values; {no, idle}: why there is none of "
    "ours, and values with which the key changes nothing there either"
    together: tuple[tuple[tuple[str, ...], Decide], ...]
    "keys, and what decides ours from their values, None where one is not given; it may raise Unmatched"
    defaults: Given
    "theirs, of keys that change what is learned"
    base: Given
    "keys of ours that theirs say nothing of"
    families: Given
    "why nothing corresponds to any key with one of these beginnings"

    @property
    def schema(self) -> type[Section]:
        """Of the config that comes out."""
        return {"train": Config, "sft": SftConfig, "train-reward": TrainRewardConfig}[self.command]


def read_kinds(trainer: str, decisions: Mapping[str, Decide]) -> dict[str, Kind]:
    """The kinds of run that a trainer's table has."""
    tables = tomllib.loads(Path(__file__).with_name(f"{trainer}.toml").read_text(encoding="utf-8"))
    return {
        name: Kind(
            name=kind["name"],
            command=kind["command"],
            rules={key: rule for table in kind["tables"] for key, rule in tables[table].items()},
            together=tuple((tuple(tables["together"][one]), decisions[one]) for one in kind["together"]),
            defaults=kind.get("defaults", {}),
            base=dict.fromkeys(kind.get("unset", ())) | kind.get("base", {}),
            families=tables["families"],
        )
        for name, kind in tables["kinds"].items()
    }


@dataclass(slots=True)
class Converted:
    """A config of ours, and what became of each of their keys."""

    kind: Kind
    origin: str
    values: dict[str, Any]
    "by our dotted key"
    taken: dict[str, str] = field(default_factory=dict)
    "their key -> what it became"
    defaults: dict[str, str] = field(default_factory=dict)
    "the same of their defaults, which the file leaves out"
    unmatched: dict[str, str] = field(default_factory=dict)
    "their key -> why it became nothing"
    to_do: list[str] = field(default_factory=list)
    branched: list[str] = field(default_factory=list)
    "what stands in branches of a script, which are not followed"

    def tree(self) -> dict[str, Any]:
        """The config, nested."""
        whole: dict[str, Any] = {}
        for key, value in self.values.items():
            *parents, leaf = key.split(".")
            node = whole
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        return whole

    def text(self) -> str:
        """The account as comments, then the config."""
        num_given = len(self.taken) + len(self.unmatched)
        lines = [
            f"{self.kind.name} of {self.origin}, for `rlhfspec {self.kind.command} --config`: {num_given} keys, "
            f"{len(self.taken)} taken over, {len(self.unmatched)} without counterpart"
        ]
        parts: tuple[tuple[str, list[str]], ...] = (
            ("To do", self.to_do),
            ("In branches of the script, not followed", self.branched),
            ("Without counterpart", [f"{key}: {why}" for key, why in self.unmatched.items()]),
            ("Taken over", [f"{key} -> {what}" for key, what in self.taken.items()]),
            ("Their defaults, which the file leaves out", [f"{k} -> {w}" for k, w in self.defaults.items()]),
        )
        for title, entries in parts:
            if entries:
                lines += ["", f"{title}:", *(f"  {one}" for one in entries)]
        comments = [f"# {line}".rstrip() for one in lines for line in one.splitlines() or [""]]
        return "\n".join(comments) + "\n" + yaml.safe_dump(self.tree(), sort_keys=False)


def convert(given: Given, kind: Kind, origin: str) -> Converted:
    """Take every key of `given` over, or say why not."""
    result = Converted(kind, origin, dict(kind.base))
    all_given = {key: value for key, value in kind.defaults.items() if key not in given} | dict(given)
    words: dict[str, list[str]] = {key: [] for key in all_given}
    reasons: dict[str, list[str]] = {key: [] for key in all_given}
    joint = {key for keys, _ in kind.together for key in keys}
    for key, value in all_given.items():
        rule = kind.rules.get(key) or _of_mapping(key, kind)
        if rule is None and key in joint:
            continue
        try:
            ours, changed = _by_rule(value, rule or {"no": _of_family(key, kind)})
        except Unmatched as fault:
            reasons[key].append(str(fault))
        else:
            result.values[ours] = changed
            words[key].append(f"{ours}: {short(changed)}")
    for keys, decide in kind.together:
        shown = [key for key in keys if key in all_given]
        decided, why = _by_decision(decide, [all_given.get(key) for key in keys]) if shown else ({}, "")
        result.values |= decided
        for key in shown:
            if decided:
                words[key].append(", ".join(decided))
            else:
                reasons[key].append(why)
    for key, value in all_given.items():
        line = f"{key} {short(value)}"
        if key not in given:
            result.defaults |= {line: "; ".join(words[key])} if words[key] else {}
            result.to_do += [] if words[key] else [f"{line}, their default: {reasons[key][0]}"]
        elif words[key]:
            result.taken[line] = "; ".join(words[key])
        else:
            result.unmatched[line] = "; ".join(dict.fromkeys(reasons[key]))
    return result


def _by_rule(value: Any, rule: Given) -> tuple[str, Any]:
    """Our key and its value. Raises Unmatched."""
    if "no" in rule:
        is_idle = value is None or value in rule.get("idle", ())
        raise Unmatched("nothing to set: it is so here too" if is_idle else rule["no"])
    key, change = rule["to"], rule["as"]
    if value is None:
        raise Unmatched("it is left open, as here where the key is left out")
    if isinstance(change, dict):
        return key, one_of(key, change)(str(value).lower())
    try:
        return key, CHANGES[change](value)
    except (TypeError, ValueError):
        raise Unmatched(f"{key} expects another kind of value; set it by hand") from None


def _of_mapping(key: str, kind: Kind) -> Given | None:
    """The rule of an entry of a mapping that is taken over whole."""
    parent, _, name = key.rpartition(".")
    rule = kind.rules.get(parent, {})
    return {"to": f"{rule['to']}.{name}", "as": "same"} if rule.get("as") == "dict" else None


def _by_decision(decide: Decide, values: list[Any]) -> tuple[Mapping[str, Any], str]:
    """Our keys, or why there are none."""
    try:
        return decide(*values), "nothing to set"
    except Unmatched as fault:
        return {}, str(fault)
    except (TypeError, ValueError, AttributeError, LookupError):
        return {}, "expected another kind of value, here or beside it; set it by hand"


def _of_family(key: str, kind: Kind) -> str:
    found = (why for why, starts in kind.families.items() if key.startswith(tuple(starts)))
    return next(found, "not a key that this command knows: look for it in docs/reference/config.md")


def short(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=False).strip()
    return cut(text.removesuffix("\n...").strip())


def one_of(key: str, names: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """A change by a table of values; others have no counterpart."""

    def change(value: Any) -> Any:
        if value not in names:
            raise Unmatched(f"{key} here is one of {', '.join(str(one) for one in names.values())}")
        return names[value]

    return change


def text(value: Any) -> str:
    """Raises Unmatched for none."""
    if str(value) == "":
        raise Unmatched("an empty text stands there")
    return str(value)


def numbers(values: Any) -> list[float]:
    """Raises TypeError for a text, whose letters are no numbers."""
    if isinstance(values, str):
        raise TypeError(values)
    return [float(one) for one in values]


def whole(value: Any) -> int:
    """A whole number above 0; others mean none."""
    if not isinstance(value, bool) and 0.0 < float(value) < 1.0:
        raise Unmatched("a share of the run's steps is meant; here it is a number: write that")
    if isinstance(value, bool) or int(value) != float(value) or int(value) <= 0:
        raise Unmatched("none is meant, which is so here too where the key is left out")
    return int(value)


def run_name(value: Any) -> str:
    """A name that a folder may have: what a shell would have filled in is cut out."""
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else " " for letter in
                   _without_shell(str(value)))  # fmt: skip
    return "-".join(kept.split())[:60].strip("._-") or "run"


def _without_shell(text: str) -> str:
    return "".join(part.partition(")")[2] if index else part for index, part in enumerate(text.split("$(")))


def data_paths(section: str, value: Any) -> dict[str, Any]:
    """`data.path`, or `data.sources` of several."""
    paths = list(value) if isinstance(value, list | tuple) else [value]
    if len(paths) == 1:
        return {f"{section}.path": str(paths[0])}
    return {f"{section}.sources": [{"path": str(path)} for path in paths]}


def adapters(rank: Any, alpha: Any, targets: Any, dropout: Any = 0) -> dict[str, Any]:
    """`trainer.lora`; dropout is always 0 here."""
    if not rank:
        raise Unmatched("no adapters: every weight learns, as here without trainer.lora")
    if dropout:
        raise Unmatched("adapters have no dropout here: take it out, then trainer.lora follows")
    lora: dict[str, Any] = {"rank": int(rank)}
    if alpha is not None:
        lora["alpha"] = float(alpha)
    if targets not in (None, "all-linear", ["all-linear"]):
        lora["targets"] = [targets] if isinstance(targets, str) else list(targets)
    return {"trainer.lora": lora}


def epochs(count: Any, steps: Any = None) -> dict[str, Any]:
    """A run's length in rows, which nothing knows before the data are read."""
    if steps and int(steps) > 0:
        raise Unmatched("the number of steps decides")
    raise Unmatched(
        f"a run is as long as run.iterations says: rows of the data x {count} / rollout.prompts_per_iteration"
    )


def tracking(where: Any, project: Any = None) -> dict[str, Any]:
    """`tracking`, of the names of loggers."""
    names = set(where) if isinstance(where, list) else {where}
    decided: dict[str, Any] = {"tracking.tensorboard": True} if "tensorboard" in names else {}
    if "wandb" in names:
        decided["tracking.wandb"] = {"project": str(project)} if project else {}
    if not decided:
        raise Unmatched("metrics.jsonl in the run folder; tracking has tensorboard and wandb")
    return decided


CHANGES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "float": float,
        "int": int,
        "bool": bool,
        "str": text,
        "numbers": numbers,
        "dict": dict,
        "same": lambda value: value,
        "one": lambda value: [int(value)],
        "count": lambda value: max(0, int(value)),
        "whole": whole,
        "run_name": run_name,
    }
)
"What a table may do to a value."


def require_mapping(tree: Any, origin: str) -> dict[str, Any]:
    """Return `tree`. Raises ConfigError where a file holds no keys."""
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{origin} holds no keys and no launch command that this command knows")
    return tree
