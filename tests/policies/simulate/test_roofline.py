"""Seconds of a forward by hand, and the engine's constants from published rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.simulated_cluster import QWEN_7B, SimulatedClusterConfig
from rlhfspec.policies.simulate.analytic_instance import (
    AnalyticInstance,
    Draft,
    accepted_nodes,
    even_acceptance,
)
from rlhfspec.policies.simulate.described_cluster import describe
from rlhfspec.policies.simulate.model_dimensions import ModelDimensions, dimensions_of, head_dimensions
from rlhfspec.policies.simulate.roofline import Reached, Roofline, flops_of
from rlhfspec.profiles.gpu_sheets import SHEETS, GPUSheet

SHEET = GPUSheet(
    name="hand",
    bf16_flops=1e12,
    fp8_flops=2e12,
    memory_bytes=1e9,
    memory_bytes_per_s=1e9,
    link_bytes_per_s=1e8,
    domain_gpus=2,
    network_bytes_per_s=1e7,
    source="a hand",
)
MODEL = ModelDimensions(
    layers=2, hidden=100, heads=4, kv_heads=2, head_size=25, vocabulary=1000, attention=10_000, dense=380_000
)
WHOLE = Reached(memory=1.0, compute=1.0, link=1.0, layer_s=0.0, collective_s=0.0)


def roofline(gpus: int = 1, **changes: Any) -> Roofline:
    reached = replace(WHOLE, **changes)
    return Roofline(model=MODEL, sheet=SHEET, gpus=gpus, precision="bf16", cache_bytes=2.0, reached=reached)


def test_a_small_batch_reads_the_weights() -> None:
    # 2 x 10,000 + 380,000 + 100,000 parameters of 2 bytes at 1 GB/s
    assert MODEL.always_read == 500_000
    assert roofline().forward_s(1, 1, 0) == pytest.approx(1e-3)
    assert roofline(memory=0.5).forward_s(1, 1, 0) == pytest.approx(2e-3)


def test_a_large_batch_is_computed() -> None:
    # 2 operations a parameter and token: 1 ms at 1000 tokens
    assert roofline().forward_s(1000, 1, 0) == pytest.approx(1e-3)
    assert roofline().forward_s(3000, 1, 0) == pytest.approx(3e-3)
    assert roofline().forward_s(1000, 3, 0) == pytest.approx(3e-3)
    assert roofline(compute=0.5).forward_s(3000, 1, 0) == pytest.approx(6e-3)


def test_contexts_cost_their_caches_and_their_products() -> None:
    # 2 x 2 layers x 2 heads x 25 x 2 bytes
    assert roofline().kv_bytes_per_token == 400
    assert roofline().forward_s(1, 1, 1e4) == pytest.approx(1e-3 + 4e-3)
    # 4 x 2 layers x 4 heads x 25 a token and token of context, 1 Tflop/s: 8 ms beside 1 ms of reading
    assert roofline().forward_s(1, 100, 1e5) == pytest.approx(100 * 1e-6 + 8e-3 + 40e-3)


def test_layers_start_and_reduce() -> None:
    assert roofline(layer_s=1e-4).forward_s(1, 1, 0) == pytest.approx(1e-3 + 2e-4)
    # two GPUs: a ring carries 2 x 1/2 of 200 bytes at 100 MB/s
    two = roofline(2, collective_s=1e-5)
    assert two.all_reduce_s(1) == pytest.approx(1e-5 + 200 / 1e8)
    assert two.forward_s(1, 1, 0) == pytest.approx(0.5e-3 + 2 * 2 * (1e-5 + 2e-6))
    # four GPUs are two domains: the network carries 2 x 3/4 of it
    assert roofline(4).all_reduce_s(10) == pytest.approx(1.5 * 2000 / 1e7)
    assert roofline().all_reduce_s(10) == 0.0


def test_heads_of_caches_are_split_no_further_than_their_number() -> None:
    assert roofline(2).cache_share == 0.5
    assert roofline(4).cache_share == 0.5


def test_experts_that_are_split_by_hand() -> None:
    experts = replace(MODEL, dense=80_000, expert=10_000, experts=8, experts_per_token=2, expert_layers=2)
    assert (experts.always_read, experts.all_experts, experts.active) == (200_000, 160_000, 240_000)
    two = replace(roofline(2, collective_s=1e-5), model=experts, split="expert")
    # one GPU holds all but half of the experts, and its own table of embeddings
    assert two.weight_bytes_per_gpu == 2.0 * (300_000 + 80_000)
    assert two.cache_share == 0.5
    # three samples: two on one GPU; of the experts 1 - (3/4)^3 are used
    used = 160_000 * (1.0 - 0.75**3)
    assert experts.experts_read(3) == pytest.approx(used)
    # a token goes to two experts of 100 numbers of 2 bytes, half of them elsewhere, at 100 MB/s
    assert two.exchange_s(2) == pytest.approx(1e-5 + 0.5 * 800 / 1e8)
    expected = 2.0 * (200_000 + used / 2) / 1e9 + 2 / 3 * 3000 * 400 / 1e9 + 4 * (1e-5 + 4e-6)
    assert two.forward_s(3, 1, 3000) == pytest.approx(expected)
    # computed: 2,000 tokens of its own, and half of 4,000 tokens' experts
    many = two.forward_s(4000, 1, 0)
    assert many == pytest.approx((2 * 200_000 * 2000 + 2 * 40_000 * 2000) / 1e12 + 4 * two.exchange_s(2000))
    alone = replace(two, gpus=1)
    assert alone.forward_s(3, 1, 3000) == pytest.approx(replace(alone, split="tensor").forward_s(3, 1, 3000))


def test_precision_decides_bytes_and_products() -> None:
    fp8 = replace(roofline(), precision="fp8")
    assert fp8.forward_s(1, 1, 0) == pytest.approx(0.5e-3)
    assert fp8.forward_s(3000, 1, 0) == pytest.approx(1.5e-3)
    with pytest.raises(ConfigError, match="A100 multiplies no 8-bit floats"):
        flops_of(SHEETS["A100"], "fp8")


def test_acceptance_that_yields_a_length() -> None:
    assert even_acceptance(1.0 + 0.5 + 0.25, 2) == pytest.approx(0.5)
    assert even_acceptance(1.0, 3) == pytest.approx(0.0, abs=1e-9)
    assert even_acceptance(4.0, 3) == pytest.approx(1.0)
    assert accepted_nodes((0.8, 0.5), 3).tolist() == pytest.approx([0.0, 0.8, 1.2, 1.4])


def test_speculation_by_hand() -> None:
    target = roofline()
    draft = Draft(
        roofline=replace(
            roofline(), model=replace(MODEL, layers=1, attention=10_000, dense=15_000, vocabulary=250)
        ),
        accepted=accepted_nodes((0.5,), 4),
        level_s=1e-4,
        step_s=2e-4,
        nodes=2,
        levels=2,
        width=1,
        tokens=1.75,
    )
    instance = AnalyticInstance(target=target, draft=draft)
    # a level reads 50,000 parameters: 0.1 ms
    assert instance.draft_s(1, 0, levels=2) == pytest.approx(2e-4 + 2 * 2e-4)
    assert instance.speculative_s(1, 0, nodes=2, levels=2) == pytest.approx(1e-3 + 6e-4)
    assert instance.rate(1, 0, "fixed") == pytest.approx(1.75 / 1.6e-3)
    # 0: 1 / 1.0 ms, 1: 1.5 / 1.4, 2: 1.75 / 1.6, 3: 1.875 / 1.8, 4: 1.9375 / 2.0
    assert instance.best_chain(1, 0) == (2, pytest.approx(1.75 / 1.6e-3))
    # where products count, another token verified costs as much as one decoded
    assert instance.best_chain(4000, 0)[0] == 0
    assert instance.rate(4000, 0, "adaptive") == pytest.approx(instance.rate(4000, 0, "off"))


def test_memory_share_and_starts_are_what_published_plain_rates_give() -> None:
    """Least squares over Qwen2.5-7B at batch 1 (arXiv 2511.16665, table 2, without speculation)."""
    published = {"A100": 92.83, "H100": 164.65, "B200": 259.71}
    model = dimensions_of(QWEN_7B, origin="Qwen2.5-7B")
    read_s = [model.always_read * 2.0 / SHEETS[name].memory_bytes_per_s for name in published]
    slope, start_s = np.polyfit(read_s, [1.0 / rate for rate in published.values()], 1)
    device = SimulatedClusterConfig().device
    assert device.memory_share == pytest.approx(1.0 / slope, abs=0.005)
    assert device.layer_s == pytest.approx(start_s / model.layers, abs=5e-7)


def test_what_the_engine_adds_to_a_speculative_step_is_what_published_rates_give() -> None:
    """AngelSlim's README: plain and EAGLE-3 tokens a second, acceptance length, levels; batch 1, vLLM, dense Qwen3.

    The GPU is not named, so each model's bandwidth is taken from its own plain rate.
    """
    published = [
        ((2048, 28, 16, 6144, True), 381.05, 642.93, 2.17, 2),
        ((2560, 36, 32, 9728, True), 233.26, 386.94, 2.08, 2),
        ((4096, 36, 32, 12288, False), 151.81, 257.52, 1.99, 2),
        ((5120, 40, 40, 17408, False), 93.26, 145.33, 1.79, 2),
        ((5120, 64, 64, 25600, False), 43.32, 74.10, 1.91, 2),
        ((2048, 28, 16, 6144, True), 347.96, 613.55, 2.51, 4),
        ((2560, 36, 32, 9728, True), 212.48, 407.47, 2.50, 4),
    ]
    device, left = SimulatedClusterConfig().device, []
    for (hidden, layers, heads, wide, tied), plain, drafted, length, levels in published:
        model = dimensions_of(
            {
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": wide,
                "vocab_size": 151936,
                "tie_word_embeddings": tied,
            },
            origin="Qwen3",
        )
        head = head_dimensions(model, layers=1, vocabulary=32000)
        byte_s = (1.0 / plain - layers * device.layer_s) / (2.0 * model.always_read)
        level_s = 2.0 * head.always_read * byte_s + device.layer_s
        left.append(length / drafted - 1.0 / plain - levels * level_s)
    drafter = SimulatedClusterConfig().drafter
    assert drafter.step_s == pytest.approx(float(np.median(left)), abs=2e-5)
    # two more levels leave no more: nothing is charged for a level
    assert drafter.level_s == 0.0 and max(left[-2:]) < max(left[:5])


def test_the_default_decodes_as_fast_as_published() -> None:
    """164.65 tokens a second on an H100: one of the three points that the constants come from."""
    instance = describe(SimulatedClusterConfig()).instance
    assert math.isclose(instance.rate(1, 300, "off"), 164.65, rel_tol=0.12)
