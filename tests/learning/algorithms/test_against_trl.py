"""Every loss and its gradient equals that of TRL's own trainers (`benchmarks/oracles/trl_losses.py`)."""

import json
from pathlib import Path

import pytest
import torch

from core.config import AlgorithmConfig
from learning.algorithms.losses import Sequences, token_weights
from learning.algorithms.objective import LossInputs, objective
from learning.update_metrics import MinibatchFigures

FROZEN = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
INPUTS = {name: torch.tensor(value) for name, value in FROZEN["inputs"].items()}
OURS = {
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


def loss_and_gradient(settings: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one minibatch, computed in two packs as a learner would."""
    algorithm = AlgorithmConfig.model_validate(settings)
    mask = INPUTS["mask"]
    weight = token_weights(mask, algorithm.loss_aggregation, max_tokens=FROZEN["max_length"])
    share = token_weights(mask, "token_mean")
    logprobs = INPUTS["logprobs"].clone().requires_grad_(True)
    has_kl = algorithm.kl_coef > 0.0 and algorithm.kl_placement == "loss"
    # TRL's delta holds both signs, but a positive advantage is clipped lower already
    advantages = INPUTS["advantages"][:, None].expand_as(mask)
    total = torch.zeros(())
    for rows in ([0, 3], [1, 2, 4, 5]):
        of_rows = mask[rows]

        def flat(tensor, rows=rows, of_rows=of_rows):
            return tensor[rows][of_rows]

        part = objective(
            LossInputs(
                logprobs=flat(logprobs),
                entropy=flat(INPUTS["entropy"]),
                old_logprobs=flat(INPUTS["old_logprobs"]),
                advantages=flat(advantages),
                importance=None,
                reference=flat(INPUTS["reference"]) if has_kl else None,
                sequences=Sequences.of(of_rows),
                weight=flat(weight),
                share=flat(share),
            ),
            algorithm=algorithm,
            kl_coef=algorithm.kl_coef,
            entropy_coef=algorithm.entropy_coef,
            figures=MinibatchFigures(),
        )
        total = total + part.detach()
        part.backward()
    assert logprobs.grad is not None
    return total, logprobs.grad


def test_every_frozen_case_is_compared():
    assert sorted(FROZEN["cases"]) == sorted(OURS)


@pytest.mark.parametrize("case", sorted(OURS))
def test_loss_and_gradient_are_those_of_trl(case):
    expected = FROZEN["cases"][case]
    loss, gradient = loss_and_gradient(OURS[case])
    assert float(loss) == pytest.approx(expected["loss"], abs=1e-6)
    assert torch.allclose(gradient, torch.tensor(expected["gradient"]), rtol=0.0, atol=1e-6)
    assert float(gradient.abs().max()) > 1e-3, "a comparison of zeros shows nothing"
