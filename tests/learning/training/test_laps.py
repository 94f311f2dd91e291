"""Where an update's seconds go, and what a GPU's peak is compared with."""

import torch
from tiny_llama import tiny_llama

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


def test_operations_are_those_of_the_weights_that_multiply():
    model = tiny_llama()
    head, inputs = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    once = sum(one.numel() for one in model.parameters()) - (0 if head is inputs else inputs.numel())
    assert step_flops(model, 10) == 60.0 * once
    inputs.requires_grad_(False)
    assert step_flops(model, 10) == 40.0 * once


def test_a_processor_has_no_data_sheet_and_a_card_has_that_of_its_name():
    assert peak_flops(torch.device("cpu")) is None
    assert peak_flops_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops_of("NVIDIA H100 PCIe") is None and peak_flops_of("NVIDIA T4") is None
