"""Reads and writes configs: YAML, `--set a.b=c`, one clear error for a bad key or value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from .config import Config
from .errors import ConfigError
from .files import write_whole
from .outside import cut, is_dir, is_file, quote
from .settings.generation import DRAFTERS_ELSEWHERE
from .settings.section import Section
from .yaml_text import YamlFault, parse_yaml

_MAX_FAULTS = 8
"Faults of one config that are spelled out."

Whole = TypeVar("Whole", bound=Section)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Load a YAML file and apply `section.key=value` overrides (values are YAML).

    Raises ConfigError: missing file, malformed YAML, unknown key (with a suggestion), refused value.
    """
    return load_config_of(Config, path, overrides)


def load_config_of(
    kind: type[Whole],
    path: str | Path | None,
    overrides: Iterable[str] = (),
    *,
    given: dict[str, dict[str, Any]] | None = None,
) -> Whole:
    """Load the config of any command: a file or none, then `given` keys of sections, then overrides.

    Raises ConfigError as `load_config`.
    """
    tree: dict[str, Any] = {} if path is None else read_tree(path)
    for section, keys in (given or {}).items():
        tree[section] = {**section_keys(path, section, tree.get(section)), **keys}
    tree = apply_overrides(tree, overrides)
    return _validated(kind, tree, origin="config" if path is None else str(path))


def read_tree(path: str | Path) -> dict[str, Any]:
    """Return what a YAML file says, not validated. Raises ConfigError: missing file, malformed YAML, no mapping."""
    path = Path(path)
    if not is_file(path):
        got = "is a folder" if is_dir(path) else "does not exist"
        raise ConfigError(f"cannot read the config: expected a YAML file, {path} {got}; check --config")
    try:
        tree = parse_yaml(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}; check --config") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no YAML: expected UTF-8 text, got byte {error.object[error.start]:#04x} at position "
            f"{error.start}; check --config, or save the file as UTF-8"
        ) from None
    except YamlFault as error:
        raise ConfigError(f"{path} is not valid YAML: {error}; fix the file") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return tree


def read_sections(path: str | Path | None) -> dict[str, dict[str, Any]]:
    """Return the sections of a YAML file, not validated; of no file none. Raises ConfigError as `read_tree`."""
    tree = {} if path is None else read_tree(path)
    return {section: section_keys(path, section, held) for section, held in tree.items()}


def section_keys(path: str | Path | None, section: str, held: object) -> dict[str, Any]:
    """What a section of a config holds. Raises ConfigError naming where it stands, where that is no section."""
    if not isinstance(held, dict | None):
        raise ConfigError(f"{path}: {section} must be a section, got {quote(held)}")
    return held or {}


def config_from_dict(tree: dict[str, Any], *, origin: str = "config") -> Config:
    """Validate a nested dict. Raises ConfigError with every fault, separated by bars."""
    return _validated(Config, tree, origin=origin)


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set `section.key=value` of each in `tree`, which is returned. Raises ConfigError for what is no such text."""
    for override in overrides:
        _apply_override(tree, override)
    return tree


_OLD_DEFAULTS: dict[str, dict[str, tuple[object, ...]]] = {
    "speculation": {"exit_layers": (0,), "ngram_max": (4,), "ngram_min": (2,), "capacity_tokens": (24,)},
    "trainer": {"stream_forwards": ("auto", "off", False)},
}
"Removed keys at values that say what happens anyway: run folders spell defaults out, and old ones are to be resumed."


def _validated(kind: type[Whole], tree: dict[str, Any], *, origin: str) -> Whole:
    for section, gone in _OLD_DEFAULTS.items():
        if isinstance(held := tree.get(section), dict):
            kept = {key: value for key, value in held.items() if value not in gone.get(key, ())}
            tree = tree | {section: kept}
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(item, kind) for item in error.errors(include_url=False)]
        more = f" | and {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
        raise ConfigError(f"{origin}: " + " | ".join(faults[:_MAX_FAULTS]) + more) from None


def dump_config(config: Section, path: str | Path) -> None:
    """Write the resolved config, every default spelled out, as YAML. Raises StorageError."""
    write_whole(Path(path), config_text(config))


def config_text(config: Section) -> str:
    """The resolved config, every default spelled out, as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set expects section.key=value, got '{cut(override)}'")
    *parents, leaf = key.strip().split(".")
    node = tree
    for parent in parents:
        below = node.get(parent)
        if below is not None and not isinstance(below, dict):
            raise ConfigError(f"--set {cut(override)}: '{parent}' is a value, not a section")
        node[parent] = dict(below or {})  # a copy: an alias in the file may name this section elsewhere too
        node = node[parent]
    try:
        node[leaf] = parse_yaml(text)
    except YamlFault as error:
        raise ConfigError(
            f"--set {cut(override)}: the value is not valid YAML: {error}; quote a word with special characters"
        ) from None


def _explain(item: Any, kind: type[Section]) -> str:
    location = [cut(str(part)) for part in item["loc"]]
    key = ".".join(location) or "config"
    if item["type"] == "extra_forbidden":
        known = _known_keys(location[:-1], kind)
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known keys here: {', '.join(known)}"
        return f"unknown key {key}; {hint}"
    if item["type"] == "missing":
        return f"{key} is missing; add it"
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}"
    hint = _meant(key, item) if item["type"] == "literal_error" else ""
    return f"{key}: {item['msg']}, got {quote(item['input'])}{hint}"


def _meant(key: str, item: Any) -> str:
    """A hint of the word that was meant by one that is not expected: what others call so, or a near one."""
    word = re.sub("[^a-z0-9]", "", str(item["input"]).lower())
    names = DRAFTERS_ELSEWHERE.items() if key == "speculation.drafter" else ()
    expected = re.findall("'([^']+)'", item["ctx"]["expected"])
    close = [ours for ours, others in names if word in others] or difflib.get_close_matches(
        word, expected, n=1
    )
    return f"; did you mean '{close[0]}'?" if close else ""


def _known_keys(path: list[str], whole: type[Section]) -> list[str]:
    model: Any = whole
    for part in path:
        if part.isdigit():  # a place in a list of sections
            continue
        kind = model.model_fields[part].annotation
        # of `Section | None` and of `tuple[Section, ...]` the section
        model = next((one for one in get_args(kind) if _is_section(one)), kind)
    return list(model.model_fields) if _is_section(model) else []


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
