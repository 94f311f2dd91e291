"""Turns the word `demo` in a config into the paths of the embedded pair, making it when needed."""

from __future__ import annotations

from pathlib import Path

from cluster.reporting.console import Reporter
from core.config import Config
from core.errors import ConfigError

DEMO = "demo"


def resolve_models(config: Config, report: Reporter) -> Config:
    """Return the config with real model paths. The embedded pair is made once and cached.

    Raises ConfigError when only one of the two models is `demo`.
    """
    models = config.models
    if DEMO not in (models.target, models.draft):
        return config
    if models.target != DEMO or models.draft not in (DEMO, None):
        raise ConfigError(
            "models.target and models.draft belong together: expected both or none to be 'demo', got "
            f"target '{models.target}' and draft '{models.draft}'"
        )
    from learning.pairs.make import make_demo_pair

    cache = Path(config.run.cache_dir).expanduser()
    with report.job("making the demo pair") as tick:
        pair = make_demo_pair(cache, progress=tick)
    paths = {"target": str(pair.target), "draft": str(pair.draft) if models.draft else None}
    return config.model_copy(update={"models": models.model_copy(update=paths)})
