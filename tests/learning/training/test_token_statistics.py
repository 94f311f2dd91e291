"""Log-probabilities and entropies by chunks: the values and gradients of the plain formulas."""

import math
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlhfspec.engine.decoding.logprobs import token_logprobs
from rlhfspec.learning.training import training_forward
from rlhfspec.learning.training.batching import PackedSequences
from rlhfspec.learning.training.objectives import head_statistics
from rlhfspec.learning.training.objectives.head_statistics import token_statistics
from rlhfspec.learning.training.training_forward import (
    prepare_for_training,
    response_logits,
    response_statistics,
)
from tests.helpers.tiny_llama import SIZES


def settings(vocab_size, dtype, temperature, *, entropy):
    return head_statistics.HeadSettings(
        vocab_size=vocab_size, dtype=dtype, temperature=temperature, entropy=entropy, has_backward=True
    )


def plain_entropy(logits, temperature):
    return torch.distributions.Categorical(logits=logits / temperature).entropy()


def test_entropy_of_known_distributions():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -math.inf, -math.inf]])
    _, entropy, _ = token_statistics(logits, torch.zeros(2, dtype=torch.int64), 1.0, entropy=True)
    # uniform over 4: ln 4; (1/4, 3/4): ln 4 - 0.75 ln 3
    assert entropy.tolist() == pytest.approx([math.log(4), math.log(4) - 0.75 * math.log(3)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(5, 11), (3000, 500)])
def test_values_are_the_engines_to_the_bit_and_gradients_those_of_autograd(shape, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * 3).requires_grad_()
    ids = torch.randint(shape[1], (shape[0],), generator=generator)
    weight = torch.rand(2, shape[0], generator=generator)
    logprobs, entropy, _ = token_statistics(logits, ids, temperature, entropy=True)
    (weight[0] * logprobs + weight[1] * entropy).sum().backward()
    got, logits.grad = logits.grad, None
    expected = token_logprobs(logits, ids, temperature)
    expected_entropy = plain_entropy(logits, temperature)
    (weight[0] * expected + weight[1] * expected_entropy).sum().backward()
    assert torch.equal(logprobs, expected)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    assert torch.allclose(got, logits.grad, atol=1e-5)


def test_a_token_that_cannot_be_sampled_gets_no_gradient():
    logits = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    logprobs, entropy, _ = token_statistics(logits, torch.tensor([1]), 1.0, entropy=True)
    (logprobs + entropy).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 2] == 0.0


def test_bfloat16_logits_give_float32_values_and_bfloat16_gradients():
    logits = torch.randn(4, 9).bfloat16().requires_grad_()
    ids = torch.tensor([0, 3, 5, 8])
    logprobs, entropy, _ = token_statistics(logits, ids, 1.0, entropy=False)
    logprobs.sum().backward()
    assert not entropy.any() and logprobs.dtype == torch.float32
    assert torch.equal(logprobs, token_logprobs(logits, ids, 1.0))
    assert logits.grad.dtype == torch.bfloat16


BEHIND_THE_HEAD = {
    "llama": {},
    "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": False},
    "granite": {"logits_scaling": 4.0},
    "phi": {"hidden_act": "gelu"},
}
"Nothing, soft caps, a factor, a divisor, a bias."


@pytest.mark.parametrize("kept", [0, 60, 1 << 20])
@pytest.mark.parametrize("family", BEHIND_THE_HEAD)
def test_by_chunks_of_the_heads_product_all_is_as_with_whole_logits(family, kept, monkeypatch):
    """Of float64; the last ids are padding of the vocabulary, the pack is a tree, all its tokens are predicted."""
    monkeypatch.setattr(head_statistics, "_PRODUCT_VALUES", 40)
    monkeypatch.setattr(head_statistics, "_KEPT_VALUES", kept)
    settings = {key: value for key, value in SIZES.items() if key != "bos_token_id"}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**settings | {"initializer_range": 0.3} | BEHIND_THE_HEAD[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    prepare_for_training(model, gradient_checkpointing=False)
    model.double()
    sequences = [np.array(one) for one in ([3, 4, 5, 6], [3, 4, 7], [3, 4, 5, 6], [9, 3], [3, 4])]
    packed = PackedSequences.of(sequences, [np.arange(len(one)) > 0 for one in sequences])
    weight = torch.rand(2, len(packed.targets), dtype=torch.float64)

    def result(logprobs, entropy, states):
        (weight[0] * logprobs + weight[1] * entropy).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return [logprobs, entropy, states, *gradients]

    logits, states = response_logits(model, packed, 17)
    whole = result(*token_statistics(logits, packed.targets, 0.7, entropy=True)[:2], states)
    again: list[torch.Tensor] = []
    chunked = result(*response_statistics(model, packed, 17, 0.7, entropy=True, logits=again)[:3])
    torch.testing.assert_close(again[0], logits, rtol=0, atol=1e-10)
    assert len(whole) == len(chunked)
    for one, other in zip(chunked, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert (model in training_forward._WHOLE_LOGITS) == (family in ("gemma2", "cohere", "granite"))


def test_no_logits_of_a_pack_are_there_at_once(monkeypatch):
    """Of a large vocabulary a chunk's are the largest tensor that is made, forward and backward."""
    monkeypatch.setattr(head_statistics, "_KEPT_VALUES", 0)
    states = torch.randn(300, 8, requires_grad=True)
    weight = torch.randn(1 << 17, 8)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            made = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
            largest = max([largest, *(one.numel() for one in made)])
            return found

    with Sizes():
        values = head_statistics.head_statistics(
            states, weight, torch.arange(300), settings(1 << 17, torch.float32, 1.0, entropy=False), None
        )
        values[0].sum().backward()
    assert head_statistics._PRODUCT_VALUES == largest < 300 * (1 << 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_gpu_holds_what_the_memory_plan_counts(dtype, entropy):
    """Counted on `meta`, whose tensors have sizes alone, by the bytes that live at once."""
    rows, vocab_size = 4096, 1 << 17
    states = torch.empty(rows, 8, device="meta", requires_grad=True)
    weight = torch.empty(vocab_size, 8, device="meta", requires_grad=True)
    live: dict[int, tuple[int, int]] = {}
    most = 0

    def gone(storage: int) -> None:
        times, num_bytes = live.pop(storage)
        if times > 1:
            live[storage] = times - 1, num_bytes

    class Live(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            found = func(*args, **(kwargs or {}))
            for one in filter(torch.is_tensor, tree_leaves(found)):
                storage = one.untyped_storage()
                times, _ = live.get(storage._cdata, (0, 0))
                live[storage._cdata] = times + 1, storage.nbytes()
                weakref.finalize(one, gone, storage._cdata)
            most = max(most, sum(num_bytes for _, num_bytes in live.values()))
            return found

    with Live():
        token_ids = torch.empty(rows, dtype=torch.int64, device="meta")
        how = settings(vocab_size, dtype, 0.7, entropy=entropy)
        values = head_statistics.head_statistics(states, weight, token_ids, how, None)
        (values[0] + values[1] if entropy else values[0]).sum().backward()
    planned = 4 * head_statistics.most_logits(rows, vocab_size, on_gpu=True)
    gradients = 3 * 4 * (states.numel() + weight.numel())
    assert planned // 2 < most <= planned + gradients


@pytest.mark.parametrize(
    ("vocab_size", "room_gib", "rows"),
    [(152_064, 0, 441), (152_064, 0.5, 1323), (152_064, 8, 2048), (32_768, 0, 2048), (32_768, 8, 2048)],
)
def test_a_gpu_takes_as_many_rows_of_a_large_vocabulary_as_there_is_room_for(
    monkeypatch, vocab_size: int, room_gib: float, rows: int
):
    monkeypatch.setattr(head_statistics, "_room_bytes", 0)
    head_statistics.use_room(int(room_gib * 2**30))
    states = torch.empty(5000, 8, device="meta")
    first, *_, last = head_statistics._product_chunks(states, vocab_size)
    assert first == slice(0, rows) and last.stop == 5000
    # a CPU's bits hang on it
    on_cpu = next(iter(head_statistics._product_chunks(torch.empty(5000, 8), vocab_size)))
    assert on_cpu.stop == max(head_statistics._PRODUCT_VALUES // vocab_size, 1)
