"""Where an update's seconds go, and what a GPU's peak is compared with."""

from typing import Any

import pytest
import torch
from tiny_llama import SIZES, tiny_llama
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

from rlhfspec.learning.training.laps import Laps, peak_flops, step_flops
from rlhfspec.profiles.gpu_sheets import peak_flops_of


def test_laps_have_no_gaps_and_are_taken_between_begin_and_end_only():
    laps = Laps(torch.device("cpu"))
    laps.lap("before")
    laps.begin()
    for part in ("forward", "backward", "forward"):
        laps.lap(part)
    assert laps._marks is not None
    whole_s = laps._marks[-1][1] - laps._marks[0][1]
    seconds = laps.end()
    assert list(seconds) == ["forward", "backward"]
    assert abs(sum(seconds.values()) - whole_s) < 1e-9
    laps.lap("after")
    assert laps.end() == {}


def tiny_mixtral(tied: bool) -> MixtralForCausalLM:
    """Two of eight experts a token."""
    settings: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": tied}
    return MixtralForCausalLM(MixtralConfig(**SIZES | settings | {"experts_implementation": "eager"}))


@pytest.mark.parametrize("make", [tiny_llama, tiny_mixtral])
@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts_of_products_with_weights(make, tied: bool):
    model = tiny_llama(tie_word_embeddings=tied) if make is tiny_llama else tiny_mixtral(tied)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(10)[None]).logits.sum().backward()
    # attention multiplies in batches, weights do not
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    norms = sum(one.numel() for one in model.parameters() if one.ndim == 1)
    assert step_flops(model, 10) == pytest.approx(counted + 60.0 * norms)
    model.get_input_embeddings().weight.requires_grad_(False)
    assert step_flops(model, 10) == pytest.approx((counted + 60.0 * norms) * 4 / 6)


def test_a_processor_has_no_data_sheet_and_a_card_has_that_of_its_name():
    assert peak_flops(torch.device("cpu")) is None
    assert peak_flops_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops_of("NVIDIA H100 PCIe") is None and peak_flops_of("NVIDIA T4") is None
    assert peak_flops_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None, "a seventh of it"
