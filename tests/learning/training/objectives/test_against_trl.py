"""Every loss and its gradient equals that of TRL's own trainers (`trl_losses.py`), in two packs as a learner has."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhfspec.core.config import AlgorithmConfig
from rlhfspec.learning.training.objectives.losses import Sequences, token_weights
from rlhfspec.learning.training.objectives.minibatch_metrics import MinibatchMetrics
from rlhfspec.learning.training.objectives.policy import LossInputs, objective

FROZEN = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
OURS: Mapping[str, Mapping[str, object]] = {
    "grpo": {"kind": "grpo", "kl_coef": 0.05},
    "bnpo": {"kind": "grpo", "loss_aggregation": "token_mean", "kl_coef": 0.05},
    "dapo": {"kind": "dapo"},
    "dr_grpo": {"kind": "dr_grpo"},
    "cispo": {"kind": "cispo"},
    "gspo": {"kind": "gspo", "clip_ratio": 0.02, "clip_ratio_high": 0.03},
    "dual clip": {"kind": "grpo", "loss_aggregation": "token_mean", "kl_coef": 0.0, "dual_clip": 1.6},
    "KL by ratio": {"kind": "grpo", "kl_coef": 0.05, "kl_bias_correction": True},
    "entropy": {"kind": "dr_grpo", "entropy_coef": 0.01},
    "rloo": {"kind": "rloo"},
    "sapo": {"kind": "grpo", "policy_loss": "sapo", "kl_coef": 0.05},
    "high entropy": {
        "kind": "grpo",
        "kl_coef": 0.05,
        "loss_aggregation": "token_mean",
        "top_entropy_quantile": 0.3,
    },
    "off-policy mask": {"kind": "grpo", "kl_coef": 0.0, "off_policy_mask_threshold": 0.02},
}
"By case of `trl_losses.CASES`: the same thing in our words."
PACKS = ([0, 3], [1, 2, 4, 5])


def loss_and_gradient(settings: Mapping[str, object], numbers: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Of one minibatch: the loss, and its gradient by the log-probabilities [B, R]."""
    inputs = {name: torch.tensor(value) for name, value in numbers["inputs"].items()}
    algorithm, mask = AlgorithmConfig.model_validate(dict(settings)), inputs["mask"]
    whole = {
        "weight": token_weights(mask, algorithm.loss_aggregation, max_tokens=numbers["max_length"]),
        "share": token_weights(mask, "token_mean"),
        "advantages": inputs["advantages"][:, None].expand(mask.shape),
        "old_logprobs": inputs["old_logprobs"],
        "entropy": inputs["entropy"],
        "sampler": inputs["old_logprobs"] + inputs["reference"] * 0.01,
    }
    least = torch.quantile(inputs["entropy"][mask], 1.0 - algorithm.top_entropy_quantile)
    has_kl = algorithm.kl_coef > 0.0 and algorithm.kl_placement == "loss"
    logprobs = inputs["logprobs"].clone().requires_grad_(True)
    total = torch.zeros(())
    for rows in PACKS:
        of_rows = mask[rows]
        loss = objective(
            LossInputs(
                logprobs=logprobs[rows][of_rows],
                importance=None,
                reference=inputs["reference"][rows][of_rows] if has_kl else None,
                sequences=Sequences.of(of_rows),
                least_entropy=float(least) if algorithm.top_entropy_quantile < 1.0 else None,
                **{name: tensor[rows][of_rows] for name, tensor in whole.items()},
            ),
            algorithm=algorithm,
            kl_coef=algorithm.kl_coef,
            entropy_coef=algorithm.entropy_coef,
            metrics=MinibatchMetrics(),
        )
        loss.backward()
        total = total + loss.detach()
    assert logprobs.grad is not None
    return total, logprobs.grad


def differences(case: str, numbers: Mapping[str, Any]) -> float:
    """Largest difference of a case's loss or gradient from TRL's."""
    loss, gradient = loss_and_gradient(OURS[case], numbers)
    theirs = numbers["cases"][case]
    of_gradient = (gradient - torch.tensor(theirs["gradient"])).abs().max()
    return max(abs(float(loss) - theirs["loss"]), float(of_gradient))


def test_every_frozen_case_is_compared():
    assert sorted(FROZEN["cases"]) == sorted(OURS)


@pytest.mark.parametrize("case", sorted(OURS))
def test_loss_and_gradient_are_those_of_trl(case):
    assert differences(case, FROZEN) < 1e-6
    _, gradient = loss_and_gradient(OURS[case], FROZEN)
    assert float(gradient.abs().max()) > 1e-3, "a comparison of zeros shows nothing"
    off_mask = [
        value
        for row, real in zip(gradient.tolist(), FROZEN["inputs"]["mask"], strict=True)
        for value, is_real in zip(row, real, strict=True)
        if not is_real
    ]
    assert off_mask and not any(off_mask)
