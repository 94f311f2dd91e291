"""Nothing in a pack's forward and backward reads a number of the device: each would be a wait for all before it.

On the `meta` device tensors have shapes and no numbers, so whatever looks at one fails.
"""

import math

import pytest
import torch

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.learning.drafts.soft_targets import SoftTargetStore
from rlhfspec.learning.training.batching import Pack
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.objectives.losses import clipped_policy_loss
from rlhfspec.learning.training.objectives.policy import (
    Coefficients,
    MinibatchMetrics,
    PolicyBatch,
    PolicyObjective,
)
from rlhfspec.learning.training.objectives.targets import Targets


def test_a_pack_is_computed_without_reading_a_number(make_model, make_rollouts):
    experience = collate(make_rollouts(make_model(), 4), pad_token_id=0)
    store = SoftTargetStore(3)
    learner = Learner(
        make_model().to("meta"),
        algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.1, entropy_coef=0.1),
        trainer=TrainerConfig(),
        temperature=0.7,
        seed=5,
        pad_token_id=0,
        observers=[store],
    )
    ones = torch.ones(experience.mask.shape)
    targets = Targets(
        advantages=ones,
        reference=-ones,
        has_kl_loss=True,
        has_entropy_loss=True,
        learned=torch.ones(len(ones), dtype=torch.bool),
        importance=ones,
        metrics={},
    )
    metrics = MinibatchMetrics()
    objective = PolicyObjective(
        experience=experience,
        targets=targets,
        algorithm=learner.algorithm,
        coefficients=Coefficients.first(learner.algorithm),
        forward=learner._forward,
        weight_version=0,
        metrics=metrics,
        laps=learner.laps,
        observers=[store],
    )
    packs = [Pack(rows=[0, 2]), Pack(rows=[1, 3])]
    batch = PolicyBatch(objective, packs, weight=ones, share=ones, engine=-ones, num_steps=0)
    for pack in packs:
        loss = batch.loss(learner.model, pack)
        loss.backward()
    assert loss.device.type == "meta"
    for read in (metrics.open_part, store.step, lambda: float(loss.detach())):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            read()


def test_sums_of_packs_are_those_of_the_minibatch():
    metrics = MinibatchMetrics()
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -1.5])
    old = logprobs - torch.tensor([0.0, 0.5, -0.1, 0.3])
    weight = torch.tensor([0.1, 0.2, 0.3, 0.4])
    differences = logprobs - old
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0])

    def add(part: slice, differences: torch.Tensor) -> None:
        policy = clipped_policy_loss(differences[part], advantages[part], clip_low=0.2, clip_high=0.2)
        metrics.add_ratio(policy, differences[part], weight[part])

    for part in (slice(0, 1), slice(1, 3), slice(3, 4)):
        add(part, differences)
    part = metrics.open_part()
    assert part.weight == pytest.approx(1.0)
    assert part.ratios == pytest.approx((math.exp(-0.1), math.exp(0.5)))
    # the last ratio is as large, but its action is bad: there the loss keeps its gradient
    assert part.sums["clip_fraction"] == part.sums["clip_fraction_high"] == pytest.approx(0.2)
    closed = metrics.close_minibatch([part], grad_norm=1.0, max_grad_norm=0.5)
    assert closed["grad_clipped_share"] == 1.0
    assert metrics.open_part() == ({}, 0.0, None)
    add(slice(0, 4), differences - 5.0)
    metrics.close_minibatch([metrics.open_part()], grad_norm=0.1, max_grad_norm=0.5)
    means = metrics.means()
    assert means["ratio_at_first_minibatch"] == pytest.approx(torch.tensor(0.5).exp()), "before any step"
    assert means["ratio_min"] == pytest.approx(torch.tensor(-5.1).exp())
    assert means["ratio_max"] == pytest.approx(torch.tensor(0.5).exp())
    assert means["grad_clipped_share"] == 0.5
    # log-ratios 0, 0.5, -0.1, 0.3, then five less: bins of 1/64 from -1/4 on, what is beyond in the outermost
    counts = metrics.log_ratio_counts()
    assert sum(counts) == 8
    assert (counts[16], counts[31], counts[9], counts[0]) == (1, 2, 1, 4)
