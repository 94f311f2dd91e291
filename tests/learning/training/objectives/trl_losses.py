"""Losses and gradients of TRL's own trainers on random tensors, for `trl_losses.json` beside this file.

Run in an environment with TRL (1.16 was used), which need not be this project's:

    python -m venv trl && trl/bin/pip install trl==1.16.0 -c constraints.txt
    trl/bin/python tests/learning/training/objectives/trl_losses.py tests/learning/training/objectives/trl_losses.json

`GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss` are called as they are, on a trainer that was never built:
its forward gives log-probabilities that were drawn here.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SHAPE = (6, 9)
MAX_LENGTH = 12

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.05},
    "bnpo": {"loss_type": "bnpo", "beta": 0.05},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    "dual clip": {"loss_type": "bnpo", "delta": 1.6},
    "KL by ratio": {"loss_type": "grpo", "beta": 0.05, "bias_correction": True},
    "entropy": {"loss_type": "dr_grpo", "entropy_coef": 0.01},
    "rloo": {"trainer": "rloo"},
    "sapo": {"loss_type": "sapo", "beta": 0.05},
    "high entropy": {"loss_type": "dapo", "beta": 0.05, "top_entropy_quantile": 0.3},
    "off-policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.02},
}


def main(path: Path) -> None:
    """Write inputs and every case's loss and gradient."""
    import trl  # type: ignore[import-not-found]

    generator = torch.Generator().manual_seed(24)
    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    mask = torch.arange(SHAPE[1])[None] < lengths[:, None]

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(SHAPE, generator=generator) * scale

    old = -draw(1.0).abs() - 0.1
    inputs = {
        "mask": mask,
        "old_logprobs": old,
        # near enough that some tokens are clipped on either side and most are not
        "logprobs": old + draw(0.25),
        "reference": old + draw(0.3),
        "advantages": torch.randn(SHAPE[0], generator=generator),
        "entropy": draw(0.5).abs(),
    }
    cases = {name: _case(inputs, **settings) for name, settings in CASES.items()}
    text = {
        "source": f"TRL {trl.__version__}, torch {torch.__version__}",
        "max_length": MAX_LENGTH,
        "inputs": {name: value.tolist() for name, value in inputs.items()},
        "cases": cases,
    }
    path.write_text(json.dumps(text, indent=1) + "\n")


def _case(inputs: dict[str, torch.Tensor], **settings: Any) -> dict[str, Any]:
    logprobs = inputs["logprobs"].clone().requires_grad_(True)
    mask = inputs["mask"].int()
    trainer = _never_built(logprobs, inputs["entropy"], **settings)
    ids = torch.zeros(SHAPE, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": inputs["advantages"],
        "old_per_token_logps": inputs["old_logprobs"],
        "ref_per_token_logps": inputs["reference"],
        "sampling_per_token_logps": inputs["old_logprobs"] + inputs["reference"] * 0.01,
        "old_logps": (inputs["old_logprobs"] * mask).sum(1),
        "num_items_in_batch": mask.sum(),
    }
    loss = _class(settings)._compute_loss(trainer, trainer.model, batch)
    loss.backward()
    assert logprobs.grad is not None
    return {"settings": settings, "loss": float(loss.detach()), "gradient": logprobs.grad.tolist()}


def _class(settings: dict[str, Any]) -> Any:
    from trl import GRPOTrainer, RLOOTrainer  # type: ignore[import-not-found]

    return RLOOTrainer if settings.get("trainer") == "rloo" else GRPOTrainer


def _never_built(logprobs: torch.Tensor, entropy: torch.Tensor, **settings: Any) -> Any:
    epsilon = settings.get("epsilon", 0.2)
    whole = SimpleNamespace(
        gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, **kwargs: x,
        num_processes=1, sync_gradients=True,
    )  # fmt: skip
    never = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=whole,
        args=SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("bias_correction", False),
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        loss_type=settings.get("loss_type"),
        importance_sampling_level=settings.get("level", "token"),
        epsilon_low=epsilon,
        epsilon_high=settings.get("epsilon_high", epsilon),
        beta=settings.get("beta", 0.0),
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=settings.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        entropy_coef=settings.get("entropy_coef", 0.0),
        _entropy_bonus_enabled=settings.get("entropy_coef", 0.0) > 0.0,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, entropy, None),
    )
    if settings.get("trainer") != "rloo":
        never.get_off_policy_mask = _class(settings).get_off_policy_mask
        never.get_high_entropy_mask = partial(_class(settings).get_high_entropy_mask, never)
    return never


if __name__ == "__main__":
    main(Path(sys.argv[1]))
