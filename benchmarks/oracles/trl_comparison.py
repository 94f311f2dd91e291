"""Our losses and gradients on the tensors of `trl_losses`, in two packs as a learner computes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhfspec.core.config import AlgorithmConfig
from rlhfspec.learning.objectives.losses import Sequences, token_weights
from rlhfspec.learning.objectives.policy import LossInputs, MinibatchFigures, objective

FROZEN_FILE = Path(__file__).resolve().parents[2] / "tests" / "learning" / "objectives" / "trl_losses.json"
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
}
"By case of `trl_losses.CASES`: the same thing in our words."
_PACKS = ([0, 3], [1, 2, 4, 5])


def frozen() -> dict[str, Any]:
    """What TRL said."""
    return json.loads(FROZEN_FILE.read_text())


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
    }
    has_kl = algorithm.kl_coef > 0.0 and algorithm.kl_placement == "loss"
    logprobs = inputs["logprobs"].clone().requires_grad_(True)
    total = torch.zeros(())
    for rows in _PACKS:
        of_rows = mask[rows]
        loss = objective(
            LossInputs(
                logprobs=logprobs[rows][of_rows],
                importance=None,
                reference=inputs["reference"][rows][of_rows] if has_kl else None,
                sequences=Sequences.of(of_rows),
                **{name: tensor[rows][of_rows] for name, tensor in whole.items()},
            ),
            algorithm=algorithm,
            kl_coef=algorithm.kl_coef,
            entropy_coef=algorithm.entropy_coef,
            figures=MinibatchFigures(),
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
