"""Divergences of TRL's own distillation on random states and heads, for `trl_divergences.json` beside this file.

Run as `trl_losses.py`:

    trl/bin/python tests/learning/training/objectives/trl_divergences.py FILE

`_chunked_divergence_loss` of the distillation trainer is called as it is. Mixtures, which it computes in float32, and
what is over the likeliest tokens are by the server's distillation trainer: `_jsd_divergence`, with its tail. All in
float64: in float32 TRL's own gradients are up to 2e-6 from these.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

TEMPERATURE = 0.7
CASES: dict[str, dict[str, Any]] = {
    "reverse": {"beta": 1.0},
    "forward": {"beta": 0.0},
    "jensen-shannon": {"beta": 0.5},
    "skewed": {"beta": 0.1},
    "likeliest, reverse": {"beta": 1.0, "top_k": 3},
    "likeliest, forward": {"beta": 0.0, "top_k": 3},
    "likeliest, mixed": {"beta": 0.5, "top_k": 3},
}


def main(path: Path) -> None:
    """Write inputs, and every case's mean loss with its gradients."""
    generator = torch.Generator().manual_seed(65)
    sizes = {"states": (7, 6), "head": (13, 6), "teacher_states": (7, 9), "teacher_head": (13, 9)}
    inputs = {name: torch.randn(size, generator=generator).double() for name, size in sizes.items()}
    found = {}
    for name, case in CASES.items():
        states, head = (inputs[one].clone().requires_grad_() for one in ("states", "head"))
        loss = _loss(states, head, inputs["teacher_states"], inputs["teacher_head"], **case)
        loss.backward()
        found[name] = {
            "settings": case,
            "loss": loss.item(),
            "states": states.grad.tolist(),
            "head": head.grad.tolist(),
        }
    numbers = {name: value.tolist() for name, value in inputs.items()}
    path.write_text(json.dumps({"temperature": TEMPERATURE, "inputs": numbers, "cases": found}))


def _loss(
    states: torch.Tensor,
    head: torch.Tensor,
    teacher_states: torch.Tensor,
    teacher_head: torch.Tensor,
    *,
    beta: float,
    top_k: int | None = None,
) -> torch.Tensor:
    from trl.experimental.server_distillation import server_distillation_trainer as sparse
    from trl.trainer.distillation_trainer import _chunked_divergence_loss  # type: ignore[import-not-found]

    if top_k is None and beta in (0.0, 1.0):
        return _chunked_divergence_loss(
            states[None],
            teacher_states[None],
            head,
            teacher_head,
            torch.ones(1, len(states), dtype=torch.float64),
            beta,
            temperature=TEMPERATURE,
        )[0]
    student = torch.log_softmax(states @ head.T / TEMPERATURE, dim=-1)
    teacher = torch.log_softmax(teacher_states @ teacher_head.T / TEMPERATURE, dim=-1)
    if top_k is None:
        return sparse._jsd_divergence(student, teacher, beta).sum(dim=-1).mean()
    likeliest = teacher.topk(top_k, dim=-1).indices
    here = torch.ones(likeliest.shape, dtype=torch.bool)
    student, there = sparse._add_tail_bucket(student.gather(-1, likeliest), here)
    teacher, _ = sparse._add_tail_bucket(teacher.gather(-1, likeliest), here)
    return sparse._jsd_divergence(student, teacher, beta, there).sum(dim=-1).mean()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
