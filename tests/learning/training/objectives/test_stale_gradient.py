"""Why stale samples are weighed: the gradient that a policy gets from samples of one two updates older.

A policy of up to 3 tokens out of 4 is a table of logits, so expected gradients are sums over all responses: of its own
samples, exactly, and of what the learner's objective makes of another policy's, weighed by how often that says them.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlhfspec.core.config import AlgorithmConfig
from rlhfspec.core.settings.correction import CorrectionConfig
from rlhfspec.learning.training.objectives.losses import Sequences
from rlhfspec.learning.training.objectives.minibatch_metrics import MinibatchMetrics
from rlhfspec.learning.training.objectives.off_policy import importance_weights
from rlhfspec.learning.training.objectives.policy import LossInputs, objective

VOCAB = 4
STEP = 1.0
"Of an update: two of them change what a token is likely by up to 30%."


def every_response(length):
    return torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))


def rewards(length):
    return torch.randn(VOCAB**length, generator=torch.Generator().manual_seed(3))


def logprobs(table, responses):
    """Of each token under logits [position, token before, token]; [N, R]."""
    before = torch.cat([torch.zeros_like(responses[:, :1]), responses[:, :-1]], dim=1)
    rows = torch.log_softmax(table, dim=-1)[torch.arange(responses.shape[1]), before]
    return rows.gather(-1, responses[..., None]).squeeze(-1)


def exact_gradient(table):
    """Of the expected reward of the policy's own responses."""
    table = table.clone().requires_grad_()
    length = len(table)
    (logprobs(table, every_response(length)).sum(dim=1).exp() * rewards(length)).sum().backward()
    assert table.grad is not None
    return table.grad


class Versions(NamedTuple):
    """Tables of three versions, each an update after the one before."""

    first: Tensor
    second: Tensor
    third: Tensor

    @classmethod
    def of(cls, length):
        first = 0.5 * torch.randn(length, VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
        second = first + STEP * exact_gradient(first)
        return cls(first, second, second + STEP * exact_gradient(second))


def expected_gradient(table, recorded, correction):
    """What the objective gives for responses with these log-probabilities, [N, R], each as often as they say."""
    table = table.clone().requires_grad_()
    length = len(table)
    now = logprobs(table, every_response(length))
    mask = torch.ones_like(now, dtype=torch.bool)
    importance = None
    if correction.compares:
        importance, _ = importance_weights(now.detach(), recorded, mask, correction)
    old = now.detach() if correction.recomputes_old(is_exact=True, max_staleness=2) else recorded
    how_often = recorded.sum(dim=1).exp()
    advantages = rewards(length) - (how_often * rewards(length)).sum()
    weight = how_often.repeat_interleave(length)
    loss = objective(
        LossInputs(
            logprobs=now.flatten(),
            entropy=None,
            old_logprobs=old.flatten(),
            advantages=advantages.repeat_interleave(length),
            importance=None if importance is None else importance.flatten(),
            reference=None,
            sequences=Sequences.of(mask),
            weight=weight,
            share=weight,
        ),
        algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0),
        kl_coef=0.0,
        entropy_coef=0.0,
        metrics=MinibatchMetrics(),
    )
    loss.backward()
    assert table.grad is not None
    return -table.grad


def distances(length, spans):
    """How far each correction's gradient is from that of own samples, over the latter's norm.

    `spans`: the version that each position's token comes from.
    """
    versions = Versions.of(length)
    policy, exact = versions.third, exact_gradient(versions.third)
    sources = [logprobs(versions[one], every_response(length))[:, at] for at, one in enumerate(spans)]
    recorded = torch.stack(sources, dim=1)
    kinds = {kind: {"kind": kind} for kind in ("none", "tis", "sequence_tis", "icepop", "decoupled")}
    kinds["as_new"] = {"kind": "none", "old_logprobs": "trainer"}
    return {
        name: float(
            (expected_gradient(policy, recorded, CorrectionConfig(**one)) - exact).norm() / exact.norm()
        )
        for name, one in kinds.items()
    }


def test_own_samples_need_no_correction():
    assert max(distances(3, (2, 2, 2)).values()) < 1e-5


CORRECTED = ("tis", "sequence_tis", "icepop", "decoupled")


def test_of_one_token_the_corrected_gradient_is_exact():
    found = distances(1, (0,))
    assert found["as_new"] > 0.2 and found["none"] > 0.2
    assert all(found[kind] < 1e-5 for kind in CORRECTED)


@pytest.mark.parametrize("spans", [(0, 0, 0), (0, 1, 1), (1, 1, 2)], ids=["old", "switched", "newer"])
def test_corrected_gradients_are_nearer_to_those_of_own_samples(spans):
    """Weights of whole responses undo all of it; those of tokens leave what earlier tokens have shifted."""
    found = distances(3, spans)
    assert found["as_new"] > 0.1
    assert found["sequence_tis"] < 1e-5
    assert all(found[kind] < 0.8 * found["as_new"] for kind in CORRECTED)


def test_a_clip_about_old_weights_holds_what_newer_ones_would_learn():
    """Two updates away the tokens that matter are beyond it: without a proximal policy hardly any gradient is left."""
    found = distances(3, (0, 0, 0))
    assert found["none"] > 4 * found["decoupled"]
