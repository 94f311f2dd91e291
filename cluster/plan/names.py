"""From names of models in a config to paths: `demo` is the embedded pair, others are real models known by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...core.config import Config
from ...core.errors import ConfigError
from ...core.settings.run import ModelsConfig
from ...learning.models.catalog import KNOWN_MODELS, KnownModel, refuse_mistyped
from ..folder.absolute_paths import DEMO
from ..observe.console import Reporter


def resolve_models(
    config: Config, report: Reporter, known: Mapping[str, KnownModel] = KNOWN_MODELS
) -> Config:
    """Return the config with model paths for names. What a name stands for is made or fetched once and cached.

    A folder that is called like a known model is taken for the folder. Raises ConfigError when only one of the
    two models is `demo` or a name is nearly a known one, and what `get_model` raises.
    """
    models = config.models
    if DEMO in (models.target, models.draft, models.teacher):
        has_head = config.speculation.drafter == "head"
        models = _with_demo_pair(models, report, has_head=has_head, cache=Path(config.run.cache_dir))
    fields = {name: getattr(models, name) for name in ("target", "draft", "teacher", "tokenizer")}
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
            "a checkpoint with such a layer with mtp, and a teacher called demo teaches the demo target"
        )
    from ...learning.models.make import make_demo_pair

    with report.job("making the demo pair") as tick:
        pair = make_demo_pair(cache.expanduser(), progress=tick)
    draft = models.draft if is_head else str(pair.draft) if models.draft else None
    teacher = str(pair.target) if models.teacher == DEMO else models.teacher
    return models.model_copy(update={"target": str(pair.target), "draft": draft, "teacher": teacher})
