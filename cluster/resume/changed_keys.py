"""What of a config may change when a run is resumed: nothing that decides its result; nothing may be gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.checkpoint_manifest import state_folders
from ...core.config import Config
from ...core.config_io import load_config, load_config_of, read_tree
from ...core.errors import ConfigError
from ...core.settings.supervised import DpoConfig, SftConfig, SupervisedConfig, TrainRewardConfig
from ..folder.absolute_paths import with_absolute_paths
from ..folder.layout import RunDir
from ..folder.run_status import describe_status, may_be_running
from ..folder.run_time import Timed, with_time

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
    # what is taken over is what would be generated
    "rollout.record",
    "rollout.look_ahead",
    "speculation",
    "drafter_training.spot",
    "trainer.gradient_checkpointing",
    # of supervised training, whose rows are compared as such too
    "trainer.checkpoint_every",
    "trainer.eval_every",
    "trainer.max_steps",
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
_OF_SAMPLES = (
    "run.seed",
    "run.template_time",
    "models",
    "data",
    "environment",
    "rollout.samples_per_prompt",
    "rollout.max_staleness",
)
"What keys, their prompts and the weights that a run begins with come of."
_SHOWN = 5
"Differences that are spelled out."


def deciding_changes(before: Config | SupervisedConfig, after: Config | SupervisedConfig) -> list[str]:
    """Every key that makes another result of the rest of the run, as `key was X, now Y`."""
    old, new = (dict(_leaves(one.model_dump(mode="json"))) for one in (before, after))
    decide = (
        _DECIDE
        if before.trainer.schedule == "constant" and before.trainer.warmup_ratio == 0.0
        else (*_DECIDE, "run.iterations", "trainer.max_steps")
    )
    return [
        f"{key} was {old.get(key)}, now {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (_is_in(key, decide) or not _is_in(key, _MAY_CHANGE))
    ]


def changed_samples(before: Config, after: Config) -> list[str]:
    """Those of the deciding changes after which a key is another sample."""
    return [change for change in deciding_changes(before, after) if _is_in(change.split(" ")[0], _OF_SAMPLES)]


def _is_in(key: str, named: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in named)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


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


def own_config(run_dir: RunDir) -> Config:
    """The config that a run goes by. Raises ConfigError: it is none of `rlhfspec train`."""
    try:
        # runs of earlier versions kept relative ones
        return with_absolute_paths(load_config(run_dir.config_file), Path.cwd())
    except ConfigError as error:
        raise ConfigError(
            f"{run_dir.path} is no run of `rlhfspec train`, or one of another version, and cannot be resumed: {error}"
            f"{kept_config(run_dir.checkpoints_folder)}"
        ) from None


def require_kept(own: Timed, file: Path, kept: Path) -> None:
    """Raise ConfigError where a run's config, of `file`, is not that of its state: it was cut, or changed by hand."""
    if kept.is_file():  # states of earlier versions have none to compare with
        then = with_absolute_paths(load_config_of(type(own), kept), Path.cwd())
        then, own = with_time(then, own.run.template_time), with_time(own, then.run.template_time)
        require_own_config(file, kept, deciding_changes(then, own))


def describe_run(run_dir: RunDir) -> list[str]:
    """Its status in words, and of a run that is over before its end how it is gone on with, or why it cannot be.

    Configs are compared as a resume does; whether a state is whole is seen by who reads it.
    """
    status, file = run_dir.status(), run_dir.config_file
    lines = describe_status(status)
    if may_be_running(status) or status["state"] == "finished":
        return lines
    for command, kind in (("sft", SftConfig), ("train-reward", TrainRewardConfig), ("dpo", DpoConfig)):
        with suppress(ConfigError):
            load_config_of(kind, file)
            return [*lines, f"  {run_dir.goes_on(command, 'trainer.checkpoint_every')}"]
    try:
        own = own_config(run_dir)
        for state in state_folders(run_dir.checkpoints_folder)[:1]:
            require_kept(own, file, state / file.name)
    except ConfigError as error:
        return [*lines, f"  it cannot be gone on with as it is: {error}"]
    return lines if (how := run_dir.goes_on()) in lines[0] else [*lines, f"  {how}"]


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
