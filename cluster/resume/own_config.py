"""A run's own config.yaml is compared with the one that its state keeps: what was cut would resume with defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfspec.core.checkpoint_manifest import state_folders
from rlhfspec.core.config_io import read_tree
from rlhfspec.core.errors import ConfigError

_SHOWN = 5
"Differences that are spelled out."


def require_own_config(own: Path, kept: Path, changes: Sequence[str] = ()) -> None:
    """Raise ConfigError where the file of a run lacks what the one in its state has, or was cut within a line.

    `changes` are differences in value that may not be. A state of an earlier version keeps none: nothing is compared.
    """
    if not kept.is_file():
        return
    what = [*changes, *(f"{key} is gone" for key in _lost(read_tree(kept), read_tree(own)))]
    if not own.read_bytes().endswith(b"\n"):
        what.append("it ends within a line")
    if what:
        more = f"; and {len(what) - _SHOWN} more" if len(what) > _SHOWN else ""
        raise ConfigError(
            f"{own} was cut or changed since {kept.parent.name} was taken: expected the config that the run goes by, "
            f"got another: {'; '.join(what[:_SHOWN])}{more}; put it back (cp {kept} {own}), and change keys with --set"
        )


def kept_config(checkpoints: Path) -> str:
    """Where the newest state keeps the config of a run whose own cannot be read, as the end of a message."""
    for state in state_folders(checkpoints):
        kept = state / "config.yaml"
        if kept.is_file():
            own = checkpoints.parent / kept.name
            return f"; if it was cut or changed, put it back as {state.name} keeps it (cp {kept} {own})"
    return ""


def _lost(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Keys that a config had and has no more: a run's own spells out every one."""
    for key, value in before.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in after:
            yield name
        elif isinstance(value, dict) and isinstance(now := after[key], dict):
            yield from _lost(value, now, name)
