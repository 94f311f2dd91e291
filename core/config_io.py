"""Reads and writes configs: YAML, `--set a.b=c`, one clear error for a bad key or value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from core.config import Config
from core.errors import ConfigError
from core.files import write_whole


class _Loader(yaml.SafeLoader):
    """YAML with 1.2's booleans: `off`, `on`, `yes` and `no` are words, so `policy: off` means what it says."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF")
)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Load a YAML file and apply `section.key=value` overrides (values are YAML).

    Raises ConfigError: missing file, malformed YAML, unknown key (with a suggestion), refused value.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"cannot read the config: expected a YAML file, {path} does not exist; check --config"
        )
    try:
        tree = yaml.load(path.read_text(), _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}; mend the file") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    return config_from_dict(tree, origin=str(path))


def config_from_dict(tree: dict[str, Any], *, origin: str = "config") -> Config:
    """Validate a nested dict. Raises ConfigError with every fault, one a line."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise ConfigError(f"{origin}: " + "\n  ".join(lines)) from None


def dump_config(config: Config, path: str | Path) -> None:
    """Write the resolved config, every default spelled out, as YAML. Raises StorageError."""
    write_whole(Path(path), yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set expects section.key=value, got '{override}'")
    *parents, leaf = key.strip().split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: '{parent}' is a value, not a section")
    node[leaf] = yaml.load(text, _Loader)


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location) or "config"
    if item["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known keys here: {', '.join(known)}"
        return f"unknown key {key}; {hint}"
    if item["type"] == "missing":
        return f"{key} is missing; add it"
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}"
    return f"{key}: {item['msg']}, got {item['input']!r}"


def _known_keys(path: list[str]) -> list[str]:
    model: Any = Config
    for part in path:
        model = model.model_fields[part].annotation
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
