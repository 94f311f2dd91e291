"""Which kind of run another trainer's file is of, and the keys that it gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhfspec.cluster.convert import openrlhf_keys, trl_keys, verl_keys
from rlhfspec.cluster.convert.launch_script import Launch, flags, read_launch, scalar
from rlhfspec.cluster.convert.python_script import read_script
from rlhfspec.cluster.convert.rules import Converted, convert, read_kinds, require_mapping
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.outside import cut
from rlhfspec.core.settings.algorithm import AlgorithmConfig
from rlhfspec.core.settings.generation import RolloutConfig
from rlhfspec.core.yaml_text import YamlFault, parse_yaml

_OTHER_KIND = "another kind of value"
"Said of a text that stands where a number is expected."
TRAINERS: dict[str, ModuleType] = {"trl": trl_keys, "verl": verl_keys, "openrlhf": openrlhf_keys}


def convert_files(trainer: str, files: Sequence[Path], kind: str | None = None) -> Converted:
    """The config of ours that files of another trainer say, with the account of every key.

    Later files add to the first and overrule it. Raises ConfigError for what cannot be read or is of no known kind.
    """
    module = TRAINERS[trainer]
    given: dict[str, Any] = {}
    branched: list[str] = []
    origin = ", ".join(file.name for file in files)
    for file in files:
        text = _text(file)
        if trainer == "trl" and (script := read_script(text)) is not None:
            kind = kind or script[0]
            given |= script[1]
            continue
        launch = read_launch(text, lambda word: module.program_kind(word) is not None)
        if launch is None:
            given |= _tree(text, file, is_nested=trainer == "verl")
            continue
        kind = kind or module.program_kind(launch.program)
        given |= _of_launch(trainer, launch)
        branched += launch.branched
    kind = (
        kind
        or (trl_keys.kind_of_keys(given) if trainer == "trl" else None)
        or ("ppo" if trainer == "verl" else None)
    )
    kinds = read_kinds(trainer, module.DECISIONS)
    if kind not in kinds:
        raise ConfigError(
            f"{origin} does not say which trainer it is of; name it with --kind, one of {', '.join(kinds)}"
            if kind is None
            else f"no counterpart to {trainer}'s {kind}; expected one of {', '.join(kinds)}"
        )
    result = convert(given, kinds[kind], origin)
    result.branched += dict.fromkeys(cut(" ".join(words.split())) for words in branched)
    result.to_do += _open_points(result)
    return result


def _of_launch(trainer: str, launch: Launch) -> dict[str, Any]:
    before = {f"launcher.{key}": value for key, value in flags(launch.launcher).items()}
    if trainer == "verl":
        return before | {
            key: scalar(text)
            for key, _, text in (word.lstrip("+").partition("=") for word in launch.words if word.strip())
        }
    ours = flags(launch.words)
    if trainer == "trl":
        ours = {key.replace("-", "_"): value for key, value in ours.items()}
        ours = {
            key.removeprefix("no_"): not value if key.startswith("no_") else value
            for key, value in ours.items()
        }
        for key in ("num_processes", "num_machines"):
            if f"launcher.{key}" in before:
                ours.setdefault(key, before.pop(f"launcher.{key}"))
    return before | ours


def _tree(text: str, file: Path, *, is_nested: bool) -> dict[str, Any]:
    try:
        tree = require_mapping(parse_yaml(text), str(file))
    except YamlFault as error:
        raise ConfigError(
            f"{file} is neither YAML ({error}) nor a script that starts a trainer this command knows"
        ) from None
    if is_nested:
        return dict(_flat(tree))
    nested = {
        key: tree[key] for key in ("deepspeed_config", "fsdp_config") if isinstance(tree.get(key), dict)
    }
    return {key: value for key, value in tree.items() if key not in nested} | dict(_flat(nested))


def _flat(tree: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings, without what only Hydra reads."""
    for name, value in tree.items():
        key = f"{start}{name}"
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{key}.")
        elif name != "_target_":
            yield key, value


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; name a config or a launch script") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is no text: expected a YAML config or a launch script") from None


def _open_points(result: Converted) -> list[str]:
    """What a run needs and their file does not say."""
    points = []
    values = result.values
    if result.kind.command == "train" and not any(key.startswith("reward") for key in values):
        values["reward.kind"] = "reward.py:reward"
        points.append(
            "reward.kind: the file names no reward; write `def reward(prompt, response)` in reward.py"
        )
    if str(values.get("reward.kind", "")).startswith(("verl.", "trl.")):
        points.append(f"reward.kind {values['reward.kind']}: needs that package where the run is")
    parts = [values, *values.get("reward.parts", ())]
    kinds = {str(part.get(key, "")) for part in parts for key in ("kind", "reward.kind")}
    points += [
        f"reward.kind {kind}: write that function into reward.py"
        for kind in sorted(kinds)
        if kind.startswith("reward.py:") and kind != "reward.py:reward"
    ]
    model = "models.target" if result.kind.command == "train" else "model.name"
    if model not in values:
        values[model] = "MODEL"
        points.append(f"{model}: the file names no model; write its folder or hub name")
    if {"data.path", "data.sources"}.isdisjoint(values):
        values["data.path"] = "data.jsonl"
        points.append("data.path: the file names no data; write the rows, or their path")
    unset = [key for key, value in values.items() if isinstance(value, str) and "$" in value]
    points += [f"{key} {values[key]}: the script leaves it to its shell; write the value" for key in unset]
    points += [why for key, why in result.unmatched.items() if key.startswith("dataset.map ")]
    open_lines = [*result.taken, *(key for key, why in result.unmatched.items() if _OTHER_KIND in why)]
    points += [
        f"{line}: the script leaves it to its shell; write the value"
        for line in open_lines
        if line.partition(" ")[2].startswith("$") and line.partition(" ")[2] not in values.values()
    ]
    if "run.output_dir" in unset:
        del values["run.output_dir"]
    if result.kind.command == "train":
        is_grpo_of_trl = result.kind.name == "TRL GRPO"
        row = AlgorithmConfig.model_validate(
            {"kind": values["algorithm.kind"]} if "algorithm.kind" in values else {}
        )
        points += [
            f"{key}: theirs is none of ours, see below; {ours} is taken unless you set it"
            for key, ours in (
                ("algorithm.kind", row.kind),
                ("algorithm.kl_coef", row.kl_coef),
                ("rollout.prompts_per_iteration", RolloutConfig().prompts_per_iteration),
            )
            if key not in values
            or (key == "algorithm.kind" and "algorithm.loss_aggregation" not in values and is_grpo_of_trl)
        ]
    if "rollout.prompts_per_iteration" in values and "run.iterations" not in values:
        points.append("run.iterations: 20 by default; see the epochs below")
    return points
