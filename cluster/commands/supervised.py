"""`rlhfspec sft`, `train-reward` and `dpo`: supervised training from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...core.errors import ConfigError
from ...core.outside import user_path
from .arguments import RunFolder, set_flag
from .declare import Arg

if TYPE_CHECKING:
    from ...core.settings.supervised import SupervisedConfig
    from ..observe.console import Reporter

ConfigFile = Annotated[Path, Arg("FILE", "YAML file; keys: docs/reference/config-supervised.md")]
Model = Annotated[str, Arg("NAME", "path, hub name or known name of the model (model.name)")]
Data = Annotated[str, Arg("FILE", "the rows (data.path)")]
Overrides = Annotated[list[str], set_flag("override one key, such as trainer.epochs=3")]
Resume = Annotated[Path, Arg("DIR", "go on with this run folder from its last state, by its own config")]


def _command(kind: str, about: str) -> Callable[..., int]:
    """The command that trains by a config class of `core.settings.supervised`; `about` is its help."""

    def command(
        *,
        config: ConfigFile | None = None,
        model: Model | None = None,
        data: Data | None = None,
        out: RunFolder | None = None,
        resume: Resume | None = None,
        overrides: Overrides,
    ) -> int:
        from ...core.settings import supervised

        train_kind(
            getattr(supervised, kind), config, overrides, None, model=model, data=data, out=out, resume=resume
        )
        return 0

    command.__doc__ = about
    return command


sft = _command(
    "SftConfig",
    r"""Supervised fine-tuning from a file.

    Supervised fine-tuning: rows with `messages` (loss on the assistant's turns), or with `prompt` and `completion`
    (text, or lists of messages), JSONL or Parquet.

      rlhfspec sft --model smollm2-135m-instruct --data train.jsonl --out sft
      rlhfspec sft --model BASE --data gsm8k.jsonl --out sft --set data.prompt_field=question \
          --set data.reference_field=answer --set trainer.lora.rank=16 --set trainer.learning_rate=2e-4
      rlhfspec sft --resume sft                       goes on from its last state (trainer.checkpoint_every)

    The checkpoint is OUT/checkpoints/model, which models.target, --model and train-reward take.
    """,
)


train_reward = _command(
    "TrainRewardConfig",
    """Train a reward model from preference pairs.

    Train a reward model: rows with `prompt`, `chosen` and `rejected` (text, or lists of messages), or `chosen` and
    `rejected` conversations that begin alike; a `margin` where rows have one. JSONL or Parquet.

      rlhfspec train-reward --model sft/checkpoints/model --data pairs.jsonl --out reward
      rlhfspec train --config FILE --set reward.kind=model --set reward.model=reward/checkpoints/model

    A causal language model gets a new head with one output. Accuracy and margin are of held-out pairs.
    """,
)


dpo = _command(
    "DpoConfig",
    """Train on preference pairs without a reward model.

    Direct preference optimisation: DPO, or IPO, hinge, KTO, ORPO (loss.type). Rows as of train-reward; for KTO also
    `prompt`, `completion` and a `label`, true or false. JSONL or Parquet.

      rlhfspec dpo --model sft/checkpoints/model --data pairs.jsonl --out dpo
      rlhfspec dpo --model BASE --data judged.jsonl --out kto --set loss.type=kto --set trainer.lora.rank=16
      rlhfspec pairs runs/RUN --out pairs.jsonl       pairs from what a run has sampled

    The reference is the model that it begins with; its log-probabilities are computed once, before the first step.
    Accuracy and margin are of held-out rows: share of pairs that the policy's change orders rightly, and by how much.
    """,
)


def train_kind(
    kind: type[SupervisedConfig],
    config: Path | None,
    overrides: list[str],
    report: Reporter | None,
    *,
    model: str | None = None,
    data: str | None = None,
    out: Path | None = None,
    resume: Path | None = None,
) -> Path:
    """Train, or go on with a run; the run's folder. Raises ConfigError, ModelError, DataError, what the job raises."""
    from ...core.config_io import load_config_of

    if resume is not None and (config or out or model or data):
        raise ConfigError(
            "--resume goes on with a run by its own config; expected no --config, --out, --model or --data beside it; "
            "change keys with --set"
        )
    given: dict[str, dict[str, Any]] = {}
    for section, key, value in (("model", "name", model), ("data", "path", data)):
        if value is not None:
            _ = user_path(value)  # a home that is not known is refused here
            given[section] = {key: value}
    path = config if resume is None else _own_config(kind, resume)
    loaded = load_config_of(kind, path, overrides, given=given)
    from ..folder.absolute_paths import with_absolute_paths

    loaded = with_absolute_paths(loaded, Path.cwd())
    # what takes seconds to load comes after what may be mistyped
    from ..jobs.supervised_run import resume_supervised, train_supervised
    from ..observe.console import Reporter

    with report or Reporter() as report:
        if resume is not None:
            checkpoint = resume_supervised(loaded, report, folder=resume)
        else:
            checkpoint = train_supervised(loaded, report, out=out)
    return checkpoint.parents[1]


def _own_config(kind: type[SupervisedConfig], folder: Path) -> Path:
    """The config that a run folder holds. Raises ConfigError: it is none, or one of another command."""
    from ...core.config_io import load_config_of
    from ..folder.layout import RunDir
    from ..resume.changed_keys import kept_config

    file = RunDir.open(folder).config_file
    try:
        load_config_of(kind, file)
    except ConfigError as error:
        raise ConfigError(
            f"{folder} is no run of this command, or one of another version, and cannot be resumed: {error}"
            f"{kept_config(file.parent / 'checkpoints')}"
        ) from None
    return file
