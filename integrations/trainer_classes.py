"""`rlhfspec.GRPO` and its kin: the command line's trainings as classes, over the same config, plan and run folder.

    run = GRPO(model="demo", train_dataset=rows, reward_funcs=[brevity], args={"run.iterations": 5}).train()

Errors are the command line's (`core.errors`); Ctrl-C is a KeyboardInterrupt once the run folder says so.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..actors.remote.loopback import spare_loopback
from ..cluster.commands.supervised import train_kind
from ..cluster.commands.train import run_prepared
from ..cluster.folder.layout import RunDir, run_base
from ..cluster.ray_start.quiet import quiet_libraries
from ..core.config import Config
from ..core.config_io import apply_overrides, load_config_of, read_tree
from ..core.errors import ConfigError
from ..core.outside import quote, user_path
from ..core.settings import supervised
from ..core.settings.run import RunConfig
from .finished_run import Run
from .given_inputs import FunctionOrName, reward_keys, source_keys, tool_keys, write_rows
from .trl_names import name_of_model, naming_trls_arguments, our_words, require_our_keys

if TYPE_CHECKING:
    from ..cluster.observe.console import Reporter

PathLike = str | os.PathLike[str]
_USUAL = Path(__file__).with_name("python.yaml")
_ALONE = {"rollout.prompts_per_iteration": 64, "rollout.samples_per_prompt": 1}
"Of what compares no samples of a prompt."


@naming_trls_arguments
@dataclass(kw_only=True, repr=False)
class _Training:
    model: PathLike | None = field(default=None, kw_only=False)
    "path, hub name, or a name that `rlhfspec models get` knows"
    train_dataset: Any = None
    "a `datasets.Dataset`, a list of dicts, or what data.path takes"
    eval_dataset: Any = None
    "likewise, rows that are only evaluated (of GRPO and kin every 10 iterations, or as evaluation.every says)"
    args: Mapping[str, Any] | PathLike = field(default_factory=dict)
    """dotted keys such as {"trainer.learning_rate": 1e-6}, as --set; or the path of a YAML file, as --config"""
    out: PathLike | None = None
    "the run folder, new; None: one in run.output_dir, with the time"
    kind: ClassVar[Mapping[str, Any]] = {}
    "keys that the class sets where nobody else does"
    config_class: ClassVar[Any] = Config
    "Config, or that of a supervised training"

    def train(self, *, resume: PathLike | bool | None = None) -> Run:
        """Train, and return the run when it has ended.

        `resume`: the folder of a run of these settings to go on with; True or "auto": the newest
        that is not finished (not of SFT and DPO).

        Raises InputError: what the command line refuses, in its words; KeyboardInterrupt: see `rlhfspec.resume`.
        """
        with reporter() as report:
            file, args = None, self.args
            if isinstance(args, str | os.PathLike):
                file, args = user_path(os.fspath(args)), {}
            require_our_keys(args, self.config_class.model_fields, self._words)
            own = {key: value for key, value in args.items() if key != "reward_weights"}
            said = as_set(own)
            tree = apply_overrides({} if file is None else read_tree(file), said)
            base = RunConfig(output_dir=_of(tree, "run").get("output_dir", RunConfig().output_dir))
            inputs = run_base(base, caller_dir=Path.cwd()) / ".inputs"
            if self.train_dataset is None and not _of(tree, "data"):
                raise ConfigError(
                    f"{type(self).__name__}: expected train_dataset (a datasets.Dataset, a list of dicts, a path), got "
                    "none; or set data.path in args"
                )
            keys = self._keys(tree, inputs, args.get("reward_weights"))
            for other in (other for key in keys for other in own if f"{key}.".startswith(f"{other}.")):
                raise ConfigError(
                    f"args has '{other}', which a parameter of {type(self).__name__} sets too; give one"
                )
            usual = {
                key: value
                for key, value in self.kind.items()
                # beside a file the class says what it is, and the command's defaults the rest
                if not _is_said(tree, key) and (file is None or key == "algorithm.kind")
            }
            where = "auto" if resume is True else os.fspath(resume) if resume else None
            named = "" if self.out is None else os.fspath(self.out)
            out = user_path(named) if named and named != where else None
            return Run(self._train(file, [*as_set(usual | keys), *said], report, where, out))

    def _words(self, name: str) -> str | None:
        command = {Config: "train", supervised.SftConfig: "sft"}.get(self.config_class, "dpo")
        return our_words(name, command, distills=self.kind.get("algorithm.kind") == "distill")

    def _keys(self, tree: dict[str, Any], inputs: Path, weights: Any) -> dict[str, Any]:
        """Keys for what the fields hold, of which files are written into `inputs`."""
        if weights is not None:
            raise ConfigError(
                f"{type(self).__name__} has no rewards that reward_weights could weigh; take it out"
            )
        given = {"data.path": self.train_dataset, "data.eval_path": self.eval_dataset}
        keys = {key: write_rows(rows, inputs)[0] for key, rows in given.items() if rows is not None}
        return keys if self.model is None else keys | {"model.name": name_of_model(self.model, "model")}

    def _train(
        self, file: Path | None, overrides: list[str], report: Reporter, resume: str | None, out: Path | None
    ) -> Path:
        if resume == "auto":
            raise ConfigError(
                f"{type(self).__name__} looks for no run of its own; expected the folder of the run to go on with, got "
                "resume=True; use rlhfspec.resume('runs/NAME')"
            )
        return train_kind(
            self.config_class, file, overrides, report, out=out, resume=user_path(resume) if resume else None
        )


@naming_trls_arguments
@dataclass(kw_only=True, repr=False)
class GRPO(_Training):
    """Reinforcement learning with rewards against the group's mean; algorithm.kind in args names others of its kin.

    Rows have `prompt` or `question`, text or messages; `answer` is the reference, other columns go to reward functions
    by their names. What is said nowhere is as in integrations/python.yaml; where args is a file, as for the command.
    """

    reward_funcs: FunctionOrName | Sequence[FunctionOrName] | None = None
    """one or several, in our form, TRL's, verl's or OpenRLHF's (docs/tutorials/reward-function.md), those of a notebook
    too; a text is a reward.kind. args may have `reward_weights`"""
    tools: FunctionOrName | Sequence[FunctionOrName] | None = None
    "Python functions that the model calls between its turns, or files of such (environment.tools)"
    kind: ClassVar[Mapping[str, Any]] = {"algorithm.kind": "grpo"}

    def _keys(self, tree: dict[str, Any], inputs: Path, weights: Any) -> dict[str, Any]:
        keys: dict[str, Any] = (
            {} if self.model is None else {"models.target": name_of_model(self.model, "model")}
        )
        for section, rows in (("data", self.train_dataset), ("evaluation.data", self.eval_dataset)):
            if rows is not None:
                said = _of(tree, *section.split("."))
                keys |= {f"{section}.{key}": value for key, value in source_keys(rows, said, inputs).items()}
        if self.eval_dataset is not None and not _is_said(tree, "evaluation.every"):
            keys["evaluation.every"] = 10
        if self.tools is not None:
            keys |= tool_keys(self.tools, inputs)
        if self.reward_funcs is not None:
            return keys | reward_keys(self.reward_funcs, weights, inputs)
        if weights is not None or not (_of(tree, "reward") or self.kind.get("algorithm.kind") == "distill"):
            raise ConfigError(
                f"{type(self).__name__}: expected reward_funcs, got none; or set reward.kind in args"
            )
        return keys

    def _train(
        self, file: Path | None, overrides: list[str], report: Reporter, resume: str | None, out: Path | None
    ) -> Path:
        from ..cluster.run.prepared_run import prepare_run

        # a run that is named goes on by its own config
        file = file or (_USUAL if resume in (None, "auto") else None)
        try:
            prepared = prepare_run(file, overrides, report, out=out, resume=resume, dry_run=False)
        except ConfigError as error:
            if not str(error).startswith(f"{_USUAL}: "):
                raise
            # the file is ours, what it was overridden by is the caller's
            raise ConfigError(str(error).replace(str(_USUAL), "args", 1)) from None
        return run_prepared(prepared, report).path


class PPO(GRPO):
    """As `GRPO`, with a critic's advantages (GAE), and one sample of each prompt."""

    kind = _ALONE | {"algorithm.kind": "ppo"}


@naming_trls_arguments
@dataclass(kw_only=True, repr=False)
class Distill(GRPO):
    """On-policy distillation: `model` learns on its own samples what a teacher gives their tokens, without rewards."""

    teacher: PathLike | None = None
    "path or name of a model with the same tokenizer (models.teacher)"
    kind = _ALONE | {"algorithm.kind": "distill"}

    def _keys(self, tree: dict[str, Any], inputs: Path, weights: Any) -> dict[str, Any]:
        teacher = {} if self.teacher is None else {"models.teacher": name_of_model(self.teacher, "teacher")}
        return teacher | super()._keys(tree, inputs, weights)


class SFT(_Training):
    """Supervised fine-tuning, as `rlhfspec sft`; rows have `messages`, or `prompt` and `completion`."""

    config_class = supervised.SftConfig


class DPO(_Training):
    """Training on preference pairs, as `rlhfspec dpo`; rows have `prompt`, `chosen` and `rejected`."""

    config_class = supervised.DpoConfig


def resume(folder: PathLike, args: Mapping[str, Any] | None = None) -> Run:
    """Go on with a run of any kind by its own config, from its last state; return it when it has ended.

    `args` changes keys, as `--set` beside `--resume`. Raises as `train`; ConfigError: the run is finished, or runs.
    """
    path, overrides = user_path(os.fspath(folder)), as_set(args or {})
    file, kind = RunDir.open(path).config_file, supervised.SftConfig
    with reporter() as report:
        if "models" in read_tree(file):
            return Run(GRPO()._train(None, overrides, report, str(path), None))
        for one in supervised.SupervisedConfig.__subclasses__():
            with suppress(ConfigError):
                kind = type(load_config_of(one, file))
        return Run(train_kind(kind, None, overrides, report, resume=path))


@contextmanager
def reporter() -> Iterator[Reporter]:
    """Bars on a terminal, plain lines elsewhere: kernels of notebooks ask for colours, and get none."""
    from ..cluster.observe.console import PipeConsole, Reporter

    spare_loopback()
    quiet_libraries()
    settings = {"force_jupyter": False, "force_terminal": sys.stdout.isatty()}
    try:
        with Reporter(PipeConsole(highlight=False, soft_wrap=True, **settings)) as report:
            yield report
    except KeyboardInterrupt as error:  # without the hundred lines of where it came
        raise KeyboardInterrupt(*error.args) from None


def as_set(keys: Mapping[str, Any]) -> list[str]:
    """As `--set` has them. Raises ConfigError for a value that is no JSON."""
    try:
        return [
            f"{key}={json.dumps(value, ensure_ascii=False, default=os.fspath)}" for key, value in keys.items()
        ]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"args: {error}; expected plain values, got {quote(keys)}") from None


def _of(tree: Mapping[str, Any], *path: str) -> dict[str, Any]:
    node: Any = tree
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, dict) else {}


def _is_said(tree: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.rpartition(".")
    return name in _of(tree, section)
