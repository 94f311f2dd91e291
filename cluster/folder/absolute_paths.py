"""Paths of a config that mean the same from any folder, as the run folder's own config has them.

What a model or data set is called may be a path or the name of something: it is a path where there is one here.
"""

from __future__ import annotations

from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from ...core.outside import is_dir
from ...core.settings.section import Section
from .layout import is_ray_working_dir

PATHS = frozenset({"run.output_dir", "run.cache_dir", "run.copy_to", "rollout.record", "reward.cache"})
"Keys of folders that need not be there; of lists of sections without the number."
FILES = frozenset(
    {
        "models.target",
        "models.draft",
        "models.teacher",
        "models.tokenizer",
        "model.name",
        "model.tokenizer",
        "model.chat_template",
        "data.path",
        "data.sources.path",
        "data.chat_template",
        "data.eval_path",
        "evaluation.data.path",
        "evaluation.data.sources.path",
        "evaluation.data.chat_template",
        "reward.model",
        "reward.parts.model",
        "speculation.profile",
        "trainer.lora.adapter_path",
    }
)
"Keys of paths, patterns, or names."
DEMO = "demo"
"As `auto`, it means the same whatever is here."

Whole = TypeVar("Whole", bound=Section)


def with_absolute_paths(config: Whole, folder: Path) -> Whole:
    """Return the config of any command as `folder`, absolute, has it.

    Unchanged in a folder that Ray has unpacked for a job: the next run of the job has another, with the same files.
    """
    return config if is_ray_working_dir(folder) else _absolute(config, "", folder)


def _absolute(value: Any, key: str, folder: Path) -> Any:
    if isinstance(value, Section):
        changed = {
            name: new
            for name, old in value
            if (new := _absolute(old, f"{key}.{name}" if key else name, folder)) is not old
        }
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, tuple):
        items = tuple(_absolute(one, key, folder) for one in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if not isinstance(value, str) or value in (DEMO, "auto") or "://" in value or value.startswith("~"):
        return value
    is_here = key in FILES and (_stands(folder / value) or _holds_subset(folder, value))
    if not (key in PATHS or is_here) or Path(value).is_absolute():
        return value
    return str(folder / value)


def _holds_subset(folder: Path, value: str) -> bool:
    """True for `FOLDER:SUBSET` of a folder that is here."""
    name, _, subset = value.rpartition(":")
    return bool(name and subset) and is_dir(folder / name)


def _stands(path: Path) -> bool:
    try:
        return path.exists() or bool(glob(str(path), recursive=True))
    except (OSError, ValueError):
        # too long for a name, such as a template itself
        return False
