"""From names in a config to paths that mean the same from any folder.

`demo` is the embedded pair, others are real models that are known by name. A relative path is made absolute, so that
the run folder's own config means the same from any folder; what a model or data set is called may be a path or the name
of something: it is a path where there is one here.
"""

from __future__ import annotations

from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from ...core.config import Config
from ...core.errors import ConfigError
from ...core.outside import is_dir
from ...core.settings.run import ModelsConfig
from ...core.settings.section import Section
from ...learning.models.catalog import KNOWN_MODELS, KnownModel, refuse_mistyped
from ..folder.layout import is_ray_working_dir
from ..observe.console import Reporter

PATHS = frozenset({"run.output_dir", "run.cache_dir", "run.copy_to"})
"Keys of folders that need not be there; of lists of sections without the number."
FILES = frozenset(
    {
        "models.target",
        "models.draft",
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
    }
)
"Keys of paths, patterns, or names."
DEMO = "demo"
_WORDS = frozenset({DEMO, "auto"})
"Mean the same whatever is here."

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
    if not isinstance(value, str) or value in _WORDS or "://" in value or value.startswith("~"):
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


def resolve_models(
    config: Config, report: Reporter, known: Mapping[str, KnownModel] = KNOWN_MODELS
) -> Config:
    """Return the config with model paths for names. What a name stands for is made or fetched once and cached.

    A folder that is called like a known model is taken for the folder. Raises ConfigError when only one of the
    two models is `demo` or a name is nearly a known one, and what `get_model` raises.
    """
    models = config.models
    if DEMO in (models.target, models.draft):
        has_head = config.speculation.drafter == "head"
        models = _with_demo_pair(models, report, has_head=has_head, cache=Path(config.run.cache_dir))
    fields = {"target": models.target, "draft": models.draft, "tokenizer": models.tokenizer}
    words = {field: name for field, name in fields.items() if name and not Path(name).is_dir()}
    for name in words.values():
        refuse_mistyped(name, known)
    names = {field: name for field, name in words.items() if name in known}
    if not names:
        return config if models is config.models else config.model_copy(update={"models": models})
    from ...learning.models.get import get_model

    cache = Path(config.run.cache_dir)
    paths = {}
    for name in sorted(set(names.values())):
        with report.job(f"getting {name}") as tick:
            model = get_model(name, cache, progress=tick, known=known)
        report.note(f"{name}: {model.path} (from the {model.source})")
        paths[name] = str(model.path)
    changes = {field: paths[name] for field, name in names.items()}
    return config.model_copy(update={"models": models.model_copy(update=changes)})


def _with_demo_pair(models: ModelsConfig, report: Reporter, *, has_head: bool, cache: Path) -> ModelsConfig:
    is_head = has_head and models.draft != DEMO
    if models.target != DEMO or (models.draft not in (DEMO, None) and not is_head):
        raise ConfigError(
            "models.target and models.draft belong together: expected both or none to be 'demo', got "
            f"target '{models.target}' and draft '{models.draft}'; a draft head goes with speculation.drafter=head, "
            "a checkpoint with such a layer with mtp"
        )
    from ...learning.models.make import make_demo_pair

    with report.job("making the demo pair") as tick:
        pair = make_demo_pair(cache.expanduser(), progress=tick)
    draft = models.draft if is_head else str(pair.draft) if models.draft else None
    return models.model_copy(update={"target": str(pair.target), "draft": draft})
