"""What several keys of verl say together; single keys are in `verl.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlhfspec.cluster.convert.rules import Decide, Unmatched, adapters, data_paths, epochs, one_of, tracking

_TRUTH = "reward_model.ground_truth"
_COLUMNS = ("data_source", "extra_info")
_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_MEANS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant_length",
}
_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {
    name: name for name in ("k1", "k2", "k3", "k1+", "k3+")
}


def _algorithm(
    estimator: Any, mode: Any, mean: Any, low: Any, high: Any, dual: Any, by_std: Any
) -> dict[str, Any]:
    """`algorithm.kind` with the parts in which verl differs from the row here."""
    kind = one_of("algorithm.kind", _ESTIMATORS)(str(estimator or "gae"))
    mode = mode or "vanilla"
    if mode not in ("vanilla", "gspo", "cispo"):
        raise Unmatched(f"no policy loss {mode} here; algorithm.kind has grpo, dr_grpo, dapo, gspo and cispo")
    # of gspo verl's loss takes the mean of sequences' means whatever loss_agg_mode says
    mean = "seq-mean-token-mean" if mode == "gspo" else mean or "token-mean"
    decided: dict[str, Any] = {
        "algorithm.kind": kind,
        "algorithm.loss_aggregation": one_of("algorithm.loss_aggregation", _MEANS)(mean),
        "algorithm.ratio_level": "sequence_mean" if mode == "gspo" else "token",
        "algorithm.clip_ratio": 0.2 if low is None else float(low),
        "algorithm.clip_ratio_high": 0.2 if high is None else float(high),
    }
    if mode == "cispo":
        decided["algorithm.policy_loss"] = "cispo"
    elif mode == "vanilla":
        decided["algorithm.dual_clip"] = 3.0 if dual is None else float(dual)
    if kind == "grpo" and by_std is False:
        decided["algorithm.advantage"] = "group_mean"
    return decided


def _returns(estimator: Any, gamma: Any, lam: Any, clip: Any) -> dict[str, Any]:
    """What discounts, and what bounds a critic."""
    kind = _ESTIMATORS.get(str(estimator or "gae"))
    if kind not in ("ppo", "reinforce_pp"):
        raise Unmatched(f"advantages {estimator} read neither returns nor a critic")
    decided = {"algorithm.gamma": 1.0 if gamma is None else float(gamma)}
    if kind == "ppo":
        decided["algorithm.gae_lambda"] = 1.0 if lam is None else float(lam)
        decided["algorithm.clip_value"] = 0.5 if clip is None else float(clip)
    return decided


def _warmup(steps: Any, prompts: Any, mini: Any, passes: Any) -> dict[str, Any]:
    """The schedule of verl goes on once an iteration, ours with each optimizer step."""
    if not steps or int(steps) <= 0:
        raise Unmatched("no warm-up is meant, as here by default")
    mini = int(mini or 256)
    updates = max(1, int(prompts or mini) // mini) * int(passes or 1)
    return {"trainer.warmup_steps": int(steps) * updates}


def _overlong(
    on: Any, tokens: Any, factor: Any, old_on: Any, old_tokens: Any, old_factor: Any
) -> dict[str, Any]:
    tokens, factor = tokens or old_tokens, old_factor if factor is None else factor
    if not (on or old_on) or not tokens:
        raise Unmatched("overlong_buffer_cfg.enable is off, so nothing reads it")
    penalty = {"buffer_tokens": int(tokens), "factor": 1.0 if factor is None else float(factor)}
    return {"reward.shaping.overlong": penalty}


def _kl(
    in_loss: Any, coefficient: Any, loss_kind: Any, in_reward: Any, penalty: Any, reward_coef: Any, control: Any,
    target: Any, horizon: Any,
) -> dict[str, Any]:  # fmt: skip
    if not in_loss and not in_reward:
        return {"algorithm.kl_coef": 0.0}
    if in_loss and in_reward:
        raise Unmatched(
            "the KL term is in the loss or in the rewards here, not in both: algorithm.kl_placement"
        )
    name = str(loss_kind or "low_var_kl") if in_loss else str(penalty or "kl")
    estimator = one_of("algorithm.kl_estimator", _KL)(name)
    given = coefficient if in_loss else reward_coef
    decided: dict[str, Any] = {
        "algorithm.kl_coef": 0.001 if given is None else float(given),
        # as a loss it has an expected gradient of zero; with `+` that of the divergence
        "algorithm.kl_estimator": "k1+" if in_loss and estimator == "k1" else estimator,
        "algorithm.kl_placement": "loss" if in_loss else "reward",
    }
    if in_reward and control == "adaptive":
        decided |= {
            "algorithm.kl_target": float(target or 0.1),
            "algorithm.kl_horizon": float(horizon or 10_000),
        }
    return decided


def _prompts(count: Any) -> dict[str, Any]:
    if not int(count):
        raise Unmatched("a fully asynchronous run has none: set it, and rollout.max_staleness")
    return {"rollout.prompts_per_iteration": int(count)}


def _minibatch(prompts: Any, group: Any) -> dict[str, Any]:
    return {"trainer.minibatch_size": int(prompts or 256) * int(group or 1)}


def _filter(on: Any, metric: Any, most: Any) -> dict[str, Any]:
    if not on:
        raise Unmatched("filter_groups.enable is off, so nothing reads it")
    decided: dict[str, Any] = {} if metric in (None, "seq_reward", "seq_final_reward") else {
        "algorithm.dynamic_sampling_metric": "correct" if metric == "acc" else str(metric)
    }  # fmt: skip
    return decided | ({"algorithm.max_extra_groups": float(most) - 1.0} if most and int(most) > 1 else {})


def _correction(weights: Any, threshold: Any, bypass: Any) -> dict[str, Any]:
    """With bypass_mode the ratio itself is over the sampler's log-probabilities, and no weight is left."""
    if bypass:
        return {"algorithm.correction.old_logprobs": "sampler"}
    if not weights:
        raise Unmatched("nothing is corrected there either")
    row = one_of("algorithm.correction.kind", {"token": "tis", "sequence": "sequence_tis"})(weights)
    return {"algorithm.correction.kind": row, "algorithm.correction.weight_cap": float(threshold or 2.0)}


def _evaluation(
    files: Any, every: Any, key: Any, temperature: Any, top_p: Any, samples: Any, sampled: Any
) -> dict[str, Any]:
    if not every or int(every) <= 0:
        raise Unmatched("trainer.test_freq is not above 0, so nothing is evaluated there")
    is_greedy = not temperature or sampled is False
    decided: dict[str, Any] = {
        "evaluation.every": int(every),
        "evaluation.temperature": 0.0 if is_greedy else float(temperature),
        "evaluation.samples_per_prompt": 1 if is_greedy else int(samples or 1),  # greedy ones are all equal
    }
    if top_p is not None:
        decided["evaluation.top_p"] = float(top_p)
    if files:
        fields = {
            "prompt_field": str(key or "prompt"),
            "reference_field": _TRUTH,
            "reward_fields": [*_COLUMNS],
        }
        paths = data_paths("data", files)
        decided["evaluation.data"] = {
            name.removeprefix("data."): value for name, value in paths.items()
        } | fields
    return decided


def _rewards(
    path: Any, name: Any, old_path: Any, old_name: Any, on: Any, model: Any, old_on: Any, old_model: Any
) -> dict[str, Any]:
    model = model or old_model
    if (on or old_on) and model:
        return {"reward.kind": "model", "reward.model": str(model)}
    file = path or old_path
    if file:
        return {"reward.kind": f"{file}:{name or old_name or 'compute_score'}"}
    raise Unmatched("the scores that verl has for its own data sets are meant")


def _adapters(rank: Any, alpha: Any, targets: Any, other_rank: Any, other_alpha: Any) -> dict[str, Any]:
    """Of FSDP, or of Megatron, whose targets have other names."""
    if rank:
        return adapters(rank, alpha or 16, targets)
    return adapters(other_rank, other_alpha or 32, None)


def _processes(nodes: Any, gpus: Any) -> dict[str, Any]:
    number = int(nodes or 1) * int(gpus or 8)
    share = {"num_actors": number, "num_gpus": 0.5}  # they take turns on the same GPUs
    return {"cluster.trainer": dict(share), "cluster.generation": dict(share)}


DECISIONS: Mapping[str, Decide] = MappingProxyType(
    {
        "data": lambda files: data_paths("data", files),
        "prompts": _prompts,
        "algorithm": _algorithm,
        "returns": _returns,
        "warmup": _warmup,
        "overlong": _overlong,
        "kl": _kl,
        "minibatch": _minibatch,
        "filter": _filter,
        "correction": _correction,
        "evaluation": _evaluation,
        "epochs": epochs,
        "rewards": _rewards,
        "processes": _processes,
        "tracking": tracking,
        "adapters": _adapters,
        "sft_adapters": lambda rank, alpha, targets: adapters(rank, alpha or 16, targets),
    }
)
"By the names that the table has for them."


def program_kind(word: str) -> str | None:
    """Of `verl.trainer.main_ppo`, `recipe.dapo.main_dapo`, `verl.trainer.sft_trainer`: the kind of run."""
    if not word.startswith(("verl.", "recipe.")):
        return None
    stem = word.rsplit(".", 1)[-1]
    if stem.startswith(("main_generation", "main_eval")):
        return stem.removeprefix("main_")
    return "sft" if "sft" in stem else "ppo" if "main" in stem else None
