"""An update on a device: the same body runs on the CPU, and with `-m gpu` on a GPU."""

import pytest
import torch

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.learning.training.learner import Learner
from tests.helpers.devices import DEVICES


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
@pytest.mark.parametrize("device", DEVICES)
def test_an_update_points_where_the_hosts_does(make_model, make_rollouts, device: str, kind: str) -> None:
    """Autocast to bfloat16 on a GPU rounds the gradients, and AdamW's first step is of their signs."""
    rollouts = make_rollouts(make_model())

    def updated(model: torch.nn.Module) -> tuple[Learner, torch.Tensor]:
        learner = Learner(
            model,
            algorithm=AlgorithmConfig.model_validate({"kind": kind}),
            trainer=TrainerConfig(learning_rate=1e-3, minibatch_size=3),
            temperature=1.0,
            seed=5,
            pad_token_id=0,
        )
        before = torch.cat([p.detach().cpu().double().flatten() for p in learner.model.parameters()])
        assert all(torch.isfinite(torch.tensor(v)) for v in learner.update(rollouts).metrics.values())
        after = torch.cat([p.detach().cpu().double().flatten() for p in learner.model.parameters()])
        return learner, after - before

    learner, change = updated(make_model().to(device))
    assert next(learner.model.parameters()).device.type == device
    _, expected = updated(make_model())
    assert expected.norm() > 0
    cosine = torch.nn.functional.cosine_similarity(change, expected, dim=0)
    assert cosine > 0.8, f"the update points elsewhere: cosine {cosine:.3f}"
