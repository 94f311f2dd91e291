"""Which keys of a config may change when a run is resumed: those that decide nothing about its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhfspec.core.config import Config

_MAY_CHANGE = (
    "run.name",
    "run.iterations",
    "run.output_dir",
    "run.cache_dir",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.state_every",
    "run.keep_states",
    "run.step_log",
    "run.copy_to",
    # prompts are compared as such (`PromptCursor.restore`), wherever they lie
    "data.path",
    "speculation",
    "drafter_training.spot",
    "drafter_training.buffer_mb",
    "drafter_training.head_learning_rate",
    "engine.max_running_samples",
    "engine.kv_cache_mb",
    "engine.turn_cache_mb",
    "engine.graph_memory_mb",
    "reallocation",
    "tracking",
    "cluster",
)
_DECIDE = ("cluster.trainer.num_actors", "cluster.trainer.num_gpus", "cluster.generation.num_gpus")
"Of those, what rounds otherwise."


def deciding_changes(before: Config, after: Config) -> list[str]:
    """Every key that makes another result of the rest of the run, as `key was X, now Y`."""
    old, new = (dict(_leaves(one.model_dump(mode="json"))) for one in (before, after))
    decide = _DECIDE if before.trainer.schedule == "constant" else (*_DECIDE, "run.iterations")
    return [
        f"{key} was {old.get(key)}, now {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (_is_in(key, decide) or not _is_in(key, _MAY_CHANGE))
    ]


def _is_in(key: str, named: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in named)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree
