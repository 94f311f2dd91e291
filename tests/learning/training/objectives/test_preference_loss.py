"""The reward model's loss: TRL's formulas as frozen numbers, values and gradients."""

import pytest
import torch

from rlhfspec.learning.training.objectives.supervised_objectives import bradley_terry_loss, preference_metrics

CHOSEN = [1.5, -0.25, 0.0, 3.0]
REJECTED = [0.5, 0.75, 0.0, -2.0]
MARGINS = [0.0, 0.5, 1.0, 2.0]
# -log(1 / (1 + exp(-x))) of x = r_chosen - r_rejected - margin, by hand to 12 digits
PLAIN = [0.313261687518, 1.313261687518, 0.693147180560, 0.006715348489]
WITH_MARGIN = [0.313261687518, 1.701413277983, 1.313261687518, 0.048587351573]
# the mean over pairs: with margins, and with 0.01 (r_chosen + r_rejected)^2 besides
MEAN = 0.844131001148
CENTERED_MEAN = 0.857256001148
# -sigmoid(-x) / 4, and + 0.01 * 2 (r_chosen + r_rejected) / 4 where centered
GRADIENT = [-0.067235355342, -0.204393619048, -0.182764644658, -0.011856468294]
CENTERED_GRADIENT = [-0.057235355342, -0.201893619048, -0.182764644658, -0.006856468294]


def tensors(requires_grad: bool = False):
    return (
        torch.tensor(CHOSEN, dtype=torch.float64, requires_grad=requires_grad),
        torch.tensor(REJECTED, dtype=torch.float64, requires_grad=requires_grad),
        torch.tensor(MARGINS, dtype=torch.float64),
    )


def test_the_loss_is_trl_s_with_and_without_margins():
    chosen, rejected, margins = tensors()
    assert bradley_terry_loss(chosen, rejected, margins * 0).tolist() == pytest.approx(PLAIN, abs=1e-11)
    assert bradley_terry_loss(chosen, rejected, margins).tolist() == pytest.approx(WITH_MARGIN, abs=1e-11)


@pytest.mark.parametrize(
    ("coefficient", "mean", "gradient"), [(0.0, MEAN, GRADIENT), (0.01, CENTERED_MEAN, CENTERED_GRADIENT)]
)
def test_mean_and_gradients_are_trl_s_with_and_without_centering(coefficient, mean, gradient):
    chosen, rejected, margins = tensors(requires_grad=True)
    loss = bradley_terry_loss(chosen, rejected, margins, center_coefficient=coefficient).mean()
    loss.backward()
    assert loss.item() == pytest.approx(mean, abs=1e-11)
    assert chosen.grad.tolist() == pytest.approx(gradient, abs=1e-11)
    centering = [2.0 * coefficient * (c + r) / 4 for c, r in zip(CHOSEN, REJECTED, strict=True)]
    mirrored = [2.0 * part - whole for part, whole in zip(centering, gradient, strict=True)]
    assert rejected.grad.tolist() == pytest.approx(mirrored, abs=1e-11)


def test_a_tie_is_no_success_and_the_margin_is_the_difference_of_scores():
    chosen, rejected, _ = tensors()
    metrics = preference_metrics(chosen, rejected)
    assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert metrics["margin"].tolist() == [1.0, -1.0, 0.0, 5.0]
    assert metrics["mean_reward"].tolist() == [1.0, 0.25, 0.0, 0.5]
