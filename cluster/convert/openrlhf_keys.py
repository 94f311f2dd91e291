"""What several flags of OpenRLHF say together; single flags are in `openrlhf.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlhfspec.cluster.convert.rules import Decide, Unmatched, adapters, data_paths, epochs, one_of

_ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}


def _algorithm(estimator: Any, policy: Any, clip: Any, low_high: Any) -> dict[str, Any]:
    """`algorithm.kind` with the parts in which theirs differs from the row here; OpenRLHF's losses are token means."""
    kind = one_of("algorithm.kind", _ESTIMATORS)(estimator or "gae")
    low, high = low_high or (clip or 0.2, clip or 0.2)
    decided: dict[str, Any] = {
        "algorithm.kind": kind,
        "algorithm.clip_ratio": float(low),
        "algorithm.clip_ratio_high": float(high),
    }
    if kind in ("grpo", "rloo"):
        decided |= {"algorithm.loss_aggregation": "token_mean", "algorithm.ratio_level": "token"}
    if policy == "gspo":
        decided |= {"algorithm.ratio_level": "sequence_mean", "algorithm.loss_aggregation": "sequence_mean"}
    return decided


def _returns(estimator: Any, gamma: Any, lambd: Any, clip: Any) -> dict[str, Any]:
    """What discounts, and what bounds a critic."""
    kind = _ESTIMATORS.get(estimator or "gae")
    if kind not in ("ppo", "reinforce_pp"):
        raise Unmatched(f"advantages {estimator} read neither returns nor a critic")
    decided = {"algorithm.gamma": 1.0 if gamma is None else float(gamma)}
    if kind == "ppo":
        decided["algorithm.gae_lambda"] = 1.0 if lambd is None else float(lambd)
        decided["algorithm.clip_value"] = 0.5 if clip is None else float(clip)
    return decided


def _kl(coefficient: Any, estimator: Any, in_loss: Any) -> dict[str, Any]:
    name, coefficient = str(estimator or "k1"), 0.01 if coefficient is None else float(coefficient)
    if in_loss and name == "k1":
        name = "k1+"
    return {
        "algorithm.kl_coef": coefficient,
        "algorithm.kl_estimator": name,
        "algorithm.kl_placement": "loss" if in_loss else "reward",
    }


def _correction(on: Any, kind: Any, band: Any) -> dict[str, Any]:
    if not on:
        raise Unmatched("is_correction_enable is off, so nothing reads it")
    low, high = band or (0.5, 5.0)
    if kind == "icepop":
        parts = {"kind": "icepop", "mask_low": float(low), "mask_high": float(high)}
    elif kind == "seq-mask-tis":
        parts = {
            "weight": "token",
            "weight_cap": None,
            "mask": "geometric",
            "mask_low": float(low),
            "mask_high": float(high),
        }
    else:
        parts = {"kind": "tis", "weight_cap": float(high)}
    return {"algorithm.correction": parts}


def _lengths(total: Any, response: Any) -> dict[str, Any]:
    """Theirs bounds prompt and response together; where the response has no bound of its own, half of it."""
    total = int(total or 2048)
    longest = int(response or total // 2)
    return {"sampling.max_new_tokens": longest, "data.max_prompt_tokens": max(1, total - longest)}


def _batches(prompts: Any, group: Any, step: Any) -> dict[str, Any]:
    samples = int(prompts or 1024) * int(group or 1)
    return {
        "rollout.prompts_per_iteration": int(prompts or 1024),
        "trainer.minibatch_size": min(int(step or 128), samples),
    }


def _rewards(model: Any, url: Any, agent: Any) -> dict[str, Any]:
    if url and str(url).endswith(".py"):
        return {"reward.kind": f"{url}:reward_func"}
    if url:
        return {"reward.kind": "serve", "reward.url": str(url)}
    if model:
        return {"reward.kind": "model", "reward.model": str(model)}
    raise Unmatched("what an agent gives is reward.kind: environment, once its class is written")


def _trainers(nodes: Any, gpus: Any, together: Any) -> dict[str, Any]:
    share = 0.5 if together else 1.0
    return {
        "cluster.trainer.num_actors": int(nodes or 1) * int(gpus or 8),
        "cluster.trainer.num_gpus": share,
        "cluster.generation.num_gpus": share,
    }


def _evaluation(
    every: Any, data: Any, split: Any, temperature: Any, samples: Any, prompt: Any, label: Any, template: Any, chat: Any
) -> dict[str, Any]:  # fmt: skip
    if not every or int(every) <= 0:
        raise Unmatched("eval.steps is not above 0, so nothing is evaluated there")
    decided: dict[str, Any] = {
        "evaluation.every": int(every),
        "evaluation.temperature": 0.6 if temperature is None else float(temperature),
        "evaluation.samples_per_prompt": int(samples or 4),
    }
    if data:
        fields = {
            "path": str(data), "split": str(split or "train"), "prompt_field": str(prompt or "input"),
            "reference_field": label, "chat": bool(chat),
        }  # fmt: skip
        if template and not chat:
            fields["prompt_template"] = _template(template)
        decided["evaluation.data"] = fields
    return decided


def _template(text: Any) -> str:
    return str(text).replace("\\n", "\n").replace("{}", "{prompt}")


def _prompt_template(text: Any, chat: Any) -> dict[str, Any]:
    if chat or not text or "{}" not in str(text):
        raise Unmatched("the chat template stands in its place, or none is meant")
    return {"data.prompt_template": _template(text)}


def _asynchrony(on: Any, filters: Any) -> dict[str, Any]:
    if not on:
        raise Unmatched("generation and update take turns, as here by default")
    if filters:
        raise Unmatched(
            "algorithm.dynamic_sampling takes turns with the update here: rollout.max_staleness 0"
        )
    return {"rollout.max_staleness": 1, "algorithm.correction": {"kind": "tis"}}


def _overlong(tokens: Any, factor: Any) -> dict[str, Any]:
    if not tokens:
        raise Unmatched("reward.overlong_buffer_len is not set, so nothing reads it")
    penalty = {"buffer_tokens": int(tokens), "factor": 1.0 if factor is None else float(factor)}
    return {"reward.shaping.overlong": penalty}


DECISIONS: Mapping[str, Decide] = MappingProxyType(
    {
        "algorithm": _algorithm,
        "returns": _returns,
        "kl": _kl,
        "correction": _correction,
        "lengths": _lengths,
        "batches": _batches,
        "epochs": epochs,
        "rewards": _rewards,
        "trainers": _trainers,
        "evaluation": _evaluation,
        "asynchrony": _asynchrony,
        "data": lambda names: data_paths("data", str(names).split(",")),
        "overlong": _overlong,
        "template": _prompt_template,
        "project": lambda name: {"tracking.wandb": {"project": str(name)}},
        "adapters": lambda rank, alpha, targets, dropout: adapters(rank, alpha or 16, targets, dropout),
    }
)
"By the names that the table has for them."


def program_kind(word: str) -> str | None:
    """Of `openrlhf.cli.train_ppo_ray`: `ppo_ray`."""
    return word.removeprefix("openrlhf.cli.train_") if word.startswith("openrlhf.cli.train_") else None
