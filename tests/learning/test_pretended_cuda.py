"""A real update and its publication on pretended CUDA tensors: nothing between devices, waits where they are known."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.records import Rollout
from rlhfspec.engine.weights.chunks import load_into, pack_weights, unpack_weights
from rlhfspec.learning.training import training_forward
from rlhfspec.learning.training.finished_model import PublishedForm
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.objectives.head_statistics import token_statistics
from tests.helpers.pretended_cuda import CUDA, NEEDS_BUILD, PretendedCuda, backward, without_a_driver

READS = {
    "engine/weights/chunks:not_finite": "one for all parameters, behind the last step",
    "learning/training/trainer_core:Trainer._clip": "losses and the gradient's norm, one a minibatch",
    "learning/training/objectives/policy:MinibatchMetrics.open_part": "figures, one a minibatch",
    "learning/training/objectives/policy:MinibatchMetrics.log_ratio_counts": "a histogram, one an update",
    "learning/training/policy_forward:PolicyForward.values": "of the reference, one a block of samples",
    "learning/training/objectives/critic:Critic.values": "of all tokens, one an update",
    "learning/training/objectives/critic:Critic.fit": "the value loss, one an update",
}
"What an update reads on the host, by who reads it."


@pytest.fixture
def _without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_driver(monkeypatch)


def learner_of(model: LlamaForCausalLM, kind: str) -> Learner:
    return Learner(
        model.to(CUDA),  # pyright: ignore[reportArgumentType]
        algorithm=AlgorithmConfig.model_validate({"kind": kind, "kl_coef": 0.1}),
        trainer=TrainerConfig(learning_rate=1e-3, minibatch_size=3),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
        compute_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("known", sorted(READS))
def test_what_is_listed_exists(known: str) -> None:
    """The check itself runs by hand: this keeps its lists from naming what is gone."""
    module, _, path = known.partition(":")
    found: Any = importlib.import_module(f"rlhfspec.{module.replace('/', '.')}")
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)


@NEEDS_BUILD
@pytest.mark.usefixtures("_without_a_driver")
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_an_update_keeps_to_the_device_and_reads_what_is_known(
    make_model: Callable[..., LlamaForCausalLM],
    make_rollouts: Callable[..., list[Rollout]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    rollouts, computed_in = make_rollouts(make_model()), set()
    inner = training_forward._products_in

    def products_in(*args: Any) -> torch.dtype:
        computed_in.add(found := inner(*args))
        return found

    monkeypatch.setattr(training_forward, "_products_in", products_in)
    with PretendedCuda() as seen:
        learner = learner_of(make_model(), kind)
        seen.forget()
        report = learner.update(rollouts)
        assert report.num_optimizer_steps > 0 and seen.num_kernels > 300, "it ran on the device"
        assert set(seen.down) <= READS.keys() and seen.down["engine/weights/chunks:not_finite"] == 1
        assert set(seen.up) == {"engine/upload:upload"}, (
            "experience lies on the host; of each pack its rows are sent"
        )
        assert set(seen.waits) == set(seen.down), "nothing is waited for but what is read"
        learned = [state for held in learner.optimizer.state.values() for state in held.values()]
        on_device = [*learner.model.parameters(), *(x for x in learned if x.dim())]
        assert {(x.device, x.dtype) for x in on_device} == {(CUDA, torch.float32)}
    assert computed_in == {torch.bfloat16}, "float32 weights, products in bfloat16"


@NEEDS_BUILD
@pytest.mark.usefixtures("_without_a_driver")
def test_a_version_is_rounded_where_it_lies_and_comes_to_the_host_once(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    with PretendedCuda() as seen:
        learner = learner_of(make_model(), "grpo")
        first, _ = pack_weights(make_model().to(torch.bfloat16), name="target", weight_version=0)
        packer = PublishedForm(first).packer(1)
        seen.forget()
        chunks = [chunk.copy() for chunk in packer.chunks(learner.weights())]
        manifest = packer.manifest()
        assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}
        assert seen.down == {"engine/weights/chunks:WeightPacker._packed": len(manifest.tensors)}
        seen.forget()
        instance = make_model(1).to(torch.bfloat16).to(CUDA)  # pyright: ignore[reportArgumentType]
        load_into(instance, unpack_weights(manifest, chunks))
        assert {p.device for p in instance.parameters()} == {CUDA}
        assert seen.up["engine/weights/chunks:copy_over"] == len(manifest.tensors)


@NEEDS_BUILD
@pytest.mark.usefixtures("_without_a_driver")
def test_what_mixes_devices_is_refused_and_what_waits_is_counted() -> None:
    with PretendedCuda() as seen:
        x, host = torch.zeros(3, device=CUDA), torch.ones(3)
        for mixes in (lambda: x + host, lambda: x[host.long()], lambda: x.index_add_(0, host.long(), x)):
            with pytest.raises(AssertionError, match="takes tensors of GPU and host"):
                mixes()
        assert not seen.waits
        assert float(x.sum()) == 1.0 and bool(x.any()) and x.cpu().tolist() == [1.0] * 3
        host.to(CUDA, non_blocking=True)
        x.copy_(host)
        assert seen.waits.total() == 5, "pageable memory waits whatever is asked for"
        torch.empty(3, pin_memory=True).to(CUDA, non_blocking=True)
        x.to("cpu", non_blocking=True)
        assert seen.waits.total() == 5 and seen.up.total() == 3 and seen.down.total() == 4


def test_the_stand_in_for_a_backward_pass_has_torchs_gradients(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    gradients = []
    for run in (torch.Tensor.backward, backward):
        model = make_model().train().requires_grad_(True)
        logprobs, entropy, _ = token_statistics(model(ids).logits[0, :-1], ids[0, 1:], 0.7, entropy=True)
        assert entropy is not None
        run((logprobs + 0.1 * entropy).sum())
        gradients.append([p.grad for p in model.parameters()])
    for ours, torchs in zip(*gradients[::-1], strict=True):
        assert ours is not None and torchs is not None and torchs.any()
        torch.testing.assert_close(ours, torchs)
