"""Divergences and their gradients equal TRL's (`trl_divergences.py`), and those of plain formulas in float64."""

import json
from pathlib import Path

import pytest
import torch

from rlhfspec.learning.training.objectives import head_statistics
from rlhfspec.learning.training.objectives.distillation import Divergence
from rlhfspec.learning.training.objectives.head_statistics import (
    HeadSettings,
    TeacherLogits,
    token_statistics,
)

FROZEN = json.loads((Path(__file__).parent / "trl_divergences.json").read_text())
INPUTS = {name: torch.tensor(value, dtype=torch.float64) for name, value in FROZEN["inputs"].items()}


@pytest.mark.parametrize("name", FROZEN["cases"])
@pytest.mark.parametrize("by_chunks", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 5e-6)])
def test_loss_and_gradients_are_those_of_trl(
    name: str, by_chunks: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_statistics, "_PRODUCT_VALUES", 26)
    case = FROZEN["cases"][name]
    inputs = {name: value.to(dtype) for name, value in INPUTS.items()}
    states, head = (inputs[one].clone().requires_grad_() for one in ("states", "head"))
    divergence = Divergence(**case["settings"])
    ids = torch.zeros(len(states), dtype=torch.int64)
    if by_chunks:
        teacher = TeacherLogits(
            states=inputs["teacher_states"], weight=inputs["teacher_head"], divergence=divergence
        )
        settings = HeadSettings(
            vocab_size=len(head),
            dtype=dtype,
            temperature=FROZEN["temperature"],
            entropy=False,
            has_backward=True,
            teacher=teacher,
        )
        found = head_statistics.head_statistics(states, head, ids, settings, None)
    else:
        logits = inputs["teacher_states"] @ inputs["teacher_head"].T
        teacher = TeacherLogits(states=logits, weight=None, divergence=divergence)
        found = token_statistics(states @ head.T, ids, FROZEN["temperature"], entropy=False, teacher=teacher)
    loss = found[2].mean()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=tolerance)
    for gradient, name in ((states.grad, "states"), (head.grad, "head")):
        theirs = torch.tensor(case[name], dtype=dtype)
        assert gradient is not None and (gradient - theirs).norm() <= tolerance * theirs.norm()


def test_a_model_is_no_distance_from_itself() -> None:
    log_probs = torch.randn(4, 50).log_softmax(-1)
    for beta in (0.0, 0.3, 1.0):
        for top_k in (None, 7, 50, 60):
            found = Divergence(beta, top_k).of(log_probs, log_probs)
            assert found.abs().max() < 1e-6


def test_what_is_masked_out_has_no_share() -> None:
    student = torch.tensor([[1.0, 2.0, -torch.inf]]).log_softmax(-1)
    teacher = torch.tensor([[1.5, 0.5, -torch.inf]]).log_softmax(-1)
    for beta in (0.0, 0.5, 1.0):
        divergence = Divergence(beta)
        alone = divergence.of(student[:, :2], teacher[:, :2])
        assert divergence.of(student, teacher).item() == pytest.approx(alone.item(), rel=1e-6)
        assert divergence.gradient(student, teacher).isfinite().all()
