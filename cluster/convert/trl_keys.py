"""What several keys of TRL say together; single keys are in `trl.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlhfspec.cluster.convert.rules import Decide, Unmatched, adapters, epochs, run_name, tracking, whole

_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_ONLY_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "grpo": ("loss_type", "scale_rewards", "importance_sampling_level", "use_vllm", "reward_funcs"),
        "ppo": ("reward_model_path", "total_episodes", "num_ppo_epochs", "cliprange"),
        "sft": ("dataset_text_field", "packing", "assistant_only_loss", "completion_only_loss"),
        "reward": ("center_rewards_coefficient",),
        "dpo": ("precompute_ref_log_probs", "label_smoothing"),
    }
)
"Keys that tell what a YAML file is of; asked in this order."


def _adam(first: float | None, second: float | None) -> dict[str, Any]:
    return {"trainer.adam_betas": [0.9 if first is None else first, 0.999 if second is None else second]}


def _dataset(name: Any, subset: Any, several: Any) -> dict[str, Any]:
    """One data set, or a mixture, which stands before it."""
    mixture = several or [{"path": name, "name": subset}]
    paths = [f"{one['path']}:{one['name']}" if one.get("name") else str(one["path"]) for one in mixture]
    if not mixture[0]["path"]:
        raise Unmatched("data.path is to be named")
    known = {"path", "name", "split", "columns"}
    rest = {key for one in mixture for key, value in one.items() if key not in known and value is not None}
    if rest:
        raise Unmatched(f"data.sources have no {', '.join(sorted(rest))}: write the files into data.path")
    splits = [one.get("split") for one in mixture]
    if len(paths) == 1:
        return {"data.path": paths[0]} | ({"data.split": splits[0]} if splits[0] else {})
    return {
        "data.sources": [
            {"path": path} | ({"split": split} if split else {})
            for path, split in zip(paths, splits, strict=True)
        ]
    }


def _adapters(rank: Any, alpha: Any, targets: Any, dropout: Any, use: Any) -> dict[str, Any]:
    return adapters((rank or 16) if use else 0, alpha or 32, targets, dropout)


def _processes(count: Any, machines: Any) -> dict[str, Any]:
    number = int(count or 1)
    if number == 1 and int(machines or 1) == 1:
        raise Unmatched("one trainer, as here by default; on a GPU set cluster.trainer.num_gpus: 1")
    return {"cluster.trainer.num_actors": number, "cluster.trainer.num_gpus": 1.0}


def _strategy(kind: Any, stage: Any) -> dict[str, Any]:
    sharded = kind == "FSDP" or (kind == "DEEPSPEED" and int(stage or 0) >= 2)
    if kind == "NO":
        raise Unmatched("one trainer, as here by default")
    return {"trainer.strategy": "fsdp2" if sharded else "ddp"}


def _step(device: Any, processes: Any, accumulate: Any) -> dict[str, Any]:
    return {"trainer.batch_size": int(device or 8) * int(processes or 1) * int(accumulate or 1)}


def _per_step_and_iteration(
    device: Any, processes: Any, accumulate: Any, generate: Any, size: Any
) -> tuple[int, int]:
    """Samples of an optimizer step, and of what is generated at once, which is an iteration here."""
    together = int(device or 8) * int(processes or 1)
    return together * int(accumulate or 1), int(size or 0) or together * int(generate or accumulate or 1)


def _batches(
    device: Any, processes: Any, accumulate: Any, generate: Any, size: Any, group: Any, mini: Any, steps: Any,
    passes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Samples of an optimizer step and of an iteration; TRL counts samples, a group of them a prompt."""
    step, per_iteration = _per_step_and_iteration(device, processes, accumulate, generate, size)
    num_group, minibatches = int(group or 1), int(mini or 1)
    if per_iteration % num_group:
        raise Unmatched(f"{per_iteration} samples an iteration are no whole number of groups of {num_group}")
    decided: dict[str, Any] = {
        "rollout.prompts_per_iteration": per_iteration // num_group,
        "rollout.samples_per_prompt": num_group,
        "trainer.minibatch_size": max(1, step // minibatches),
    }
    if steps and int(steps) > 0:
        decided["run.iterations"] = _iterations(steps, step, per_iteration, passes)
    return decided


def _iterations(steps: Any, step: int, per_iteration: int, passes: Any) -> int:
    """Of so many optimizer steps."""
    return max(1, round(int(steps) * step / (per_iteration * int(passes or 1))))


def _checkpoints(
    every: Any,
    strategy: Any,
    device: Any,
    processes: Any,
    accumulate: Any,
    generate: Any,
    size: Any,
    passes: Any,
) -> dict[str, Any]:
    """TRL counts optimizer steps, of which an iteration has several."""
    steps = _saved_every(every, strategy)
    samples = _per_step_and_iteration(device, processes, accumulate, generate, size)
    return {"run.checkpoint_every": _iterations(steps, *samples, passes)}


def _saved_every(every: Any, strategy: Any) -> int:
    if every is None or strategy not in (None, "steps"):
        raise Unmatched("run.checkpoint_every counts iterations; the last checkpoint is always written")
    return whole(every)


def _ppo_batches(
    device: Any, processes: Any, accumulate: Any, mini: Any, episodes: Any, epochs: Any
) -> dict[str, Any]:
    decided = _batches(device, processes, accumulate, None, None, 1, mini, None, None)
    num = decided["rollout.prompts_per_iteration"]
    decided["trainer.epochs"] = int(epochs or 4)
    return decided | ({"run.iterations": max(1, int(episodes) // num)} if episodes else {})


def _scale(how: Any) -> dict[str, Any]:
    if how == "batch":
        raise Unmatched(
            "rewards are scaled by group or not at all: algorithm.advantage group_std or group_mean"
        )
    return {"algorithm.advantage": "group_mean" if how in (False, "none", "False") else "group_std"}


def _loss(kind: Any, level: Any, high: Any, low: Any) -> dict[str, Any]:
    """GRPO's parts: how the loss is averaged, over what ratio, clipped how."""
    means = {"grpo": "sequence_mean", "dr_grpo": "constant_length"}
    if kind not in (*means, "dapo", "bnpo", "cispo"):
        raise Unmatched(f"no loss {kind} here; algorithm.kind has grpo, dr_grpo, dapo, gspo and cispo")
    decided: dict[str, Any] = {
        "algorithm.kind": "cispo" if kind == "cispo" else "grpo",
        "algorithm.loss_aggregation": means.get(kind, "token_mean"),
        "algorithm.ratio_level": "sequence_mean" if level == "sequence" else "token",
    }
    if kind == "cispo":
        # there the bound is of the ratio itself, and there is none below
        decided |= {
            "algorithm.clip_ratio": 1.0,
            "algorithm.clip_ratio_high": max(float(high or low) - 1.0, 1e-6),
        }
    elif high is not None:
        decided["algorithm.clip_ratio_high"] = float(high)
    return decided


def _entropy(adaptive: Any, target: Any, largest: Any, step: Any) -> dict[str, Any]:
    if not adaptive:
        raise Unmatched("use_adaptive_entropy is off, so nothing reads it")
    return {
        "algorithm.entropy_target": float(target or 0.2),
        "algorithm.entropy_coef_max": float(largest or 1.0),
        "algorithm.entropy_coef_step": float(step or 0.005),
    }


def _correction(vllm: Any, on: Any, mode: Any, high: Any, low: Any) -> dict[str, Any]:
    if not vllm or on is False:
        raise Unmatched("nothing is corrected there either")
    level, _, how = str(mode or "sequence_mask").partition("_")
    bound = 3.0 if high is None else float(high)
    row = (
        {"token": "tis", "sequence": "sequence_tis"}
        if how == "truncate"
        else {"token": "icepop", "sequence": "mis"}
    )
    decided: dict[str, Any] = {"algorithm.correction.kind": row.get(level, "mis")}
    if how == "truncate":
        return decided | {"algorithm.correction.weight_cap": bound}
    return decided | {
        "algorithm.correction.mask_low": float(low or 0.0),
        "algorithm.correction.mask_high": bound,
    }


def _rewards(functions: Any, weights: Any, model: Any) -> dict[str, Any]:
    """One reward, or a mixture; functions of TRL's own need TRL where the run is."""
    names: list[str] = [functions] if isinstance(functions, str) else list(functions or ())
    decided: dict[str, Any] = {}
    if "get_soft_overlong_punishment" in names:
        names.remove("get_soft_overlong_punishment")
        decided["reward.shaping.overlong"] = {"max_tokens": 1280, "buffer_tokens": 256}
    if any("accuracy_reward" in name for name in names):
        decided["data.reward_fields"] = ["solution"]
    kinds = [
        {"kind": f"trl.rewards:{name}" if name in _OF_TRL else ":".join(name.rsplit(".", 1))}
        for name in names
    ]
    if model:
        kinds.insert(0, {"kind": "model", "model": str(model)})
    if len(kinds) == 1:
        return decided | {f"reward.{key}": value for key, value in kinds[0].items()}
    counts = list(weights) if weights else [1.0] * len(kinds)
    parts = [
        {"name": run_name(one.get("kind", "").split(":")[-1]), "weight": float(count), **one}
        for one, count in zip(kinds, counts, strict=False)
    ]
    return decided | ({"reward.parts": parts} if parts else {})


def _evaluation(
    strategy: Any, every: Any, logged: Any, at_start: Any, name: Any, split: Any, temperature: Any, top_p: Any,
    group: Any, group_then: Any, device: Any, processes: Any, accumulate: Any, generate: Any, size: Any,
    passes: Any,
) -> dict[str, Any]:  # fmt: skip
    """TRL evaluates by the sampling of its training; without eval_steps as often as it logs."""
    if strategy != "steps":
        raise Unmatched("nothing is evaluated by steps there")
    samples = _per_step_and_iteration(device, processes, accumulate, generate, size)
    decided: dict[str, Any] = {
        "evaluation.every": _iterations(whole(every or logged or 10), *samples, passes),
        "evaluation.at_start": bool(at_start),
        "evaluation.temperature": 1.0 if temperature is None else float(temperature),
        "evaluation.top_p": 1.0 if top_p is None else float(top_p),
        "evaluation.samples_per_prompt": int(group_then or group or 8),
    }
    if name:
        decided["evaluation.data"] = {
            "path": str(name), "split": str(split or "test"), "prompt_field": "prompt", "reference_field": None,
        }  # fmt: skip
    return decided


DECISIONS: Mapping[str, Decide] = MappingProxyType(
    {
        "adam": _adam,
        "dataset": _dataset,
        "adapters": _adapters,
        "processes": _processes,
        "strategy": _strategy,
        "step": _step,
        "batches": _batches,
        "ppo_batches": _ppo_batches,
        "epochs": epochs,
        "loss": _loss,
        "scale": _scale,
        "entropy": _entropy,
        "correction": _correction,
        "rewards": _rewards,
        "reward_model": lambda path: {"reward.kind": "model", "reward.model": str(path)},
        "evaluation": _evaluation,
        "checkpoints": _checkpoints,
        "ppo_checkpoints": lambda every, how: {"run.checkpoint_every": _saved_every(every, how)},
        "tracking": tracking,
    }
)
"By the names that the table has for them."


def program_kind(word: str) -> str | None:
    """Of `grpo`, `trl.scripts.grpo`, `examples/scripts/ppo/ppo_tldr.py`: the trainer."""
    stem = word.rsplit("/", 1)[-1].removesuffix(".py").removeprefix("trl.scripts.")
    if stem == word and not word.isalpha():
        return None
    name = {"gspo": "grpo", "reward_modeling": "reward"}.get(stem, stem.split("_")[0])
    return name if name in ("sft", "reward", "dpo", "grpo", "rloo", "ppo") else None


def kind_of_keys(given: Mapping[str, Any]) -> str | None:
    """What trainer a YAML file is of; None where its keys do not say."""
    return next((name for name, keys in _ONLY_OF.items() if any(key in given for key in keys)), None)
