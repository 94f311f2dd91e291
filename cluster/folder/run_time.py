"""The time that a run's chat templates are told: taken once, when the run begins, and kept in its config."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from ...core.config import Config
from ...core.settings.supervised import SupervisedConfig

Timed = TypeVar("Timed", Config, SupervisedConfig)
_BEGAN = re.compile(r"-(\d{8}-\d{6})(?:-\d+)?$")


def with_time(config: Timed, at: datetime | str | None = None) -> Timed:
    """The config with the time that its templates are told: its own, else `at`, else now."""
    if config.run.template_time is not None:
        return config
    if not isinstance(at, str):
        at = (at or datetime.now()).astimezone().isoformat(timespec="seconds")
    return config.model_copy(update={"run": config.run.model_copy(update={"template_time": at})})


def of_folder(config: Timed, folder: Path) -> Timed:
    """The config of a run folder; one of an earlier version, which kept no time, has that of its folder's name."""
    return with_time(config, folder_time(folder))


def folder_time(folder: Path) -> datetime:
    """When a run began that kept no time: as its name says, else when its config was written."""
    found = _BEGAN.search(folder.name)
    if found is not None:
        try:
            return datetime.strptime(found[1], "%Y%m%d-%H%M%S")
        except ValueError:
            pass
    return datetime.fromtimestamp((folder / "config.yaml").stat().st_mtime)
