"""Updates, traffic, publication and memory by hand."""

from __future__ import annotations

import pytest

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.simulated_cluster import SimulatedLearnerConfig
from rlhfspec.policies.simulate.model_dimensions import ModelDimensions
from rlhfspec.policies.simulate.roofline import Reached, Roofline
from rlhfspec.policies.simulate.training_cost import (
    gather_s,
    memory_fit,
    most_slots,
    publication_s,
    training_cost,
)
from rlhfspec.profiles.gpu_sheets import GPUSheet

SHEET = GPUSheet(
    name="hand",
    bf16_flops=1e12,
    fp8_flops=None,
    memory_bytes=1e7,
    memory_bytes_per_s=1e9,
    link_bytes_per_s=1e8,
    domain_gpus=2,
    network_bytes_per_s=1e7,
    source="a hand",
)
MODEL = ModelDimensions(
    layers=2, hidden=100, heads=4, kv_heads=2, head_size=25, vocabulary=1000, attention=10_000, dense=380_000
)


def test_an_update_by_hand() -> None:
    learner = SimulatedLearnerConfig(mfu=0.5, forward_mfu=1.0, recompute=False, sharded=False, overlap=False)
    cost = training_cost(MODEL, SHEET, learner, gpus=1, tokens=1e6, mean_tokens=0.0, link_share=1.0)
    # 6 operations a parameter and token at half of 1 Tflop/s; 2 for the log-probabilities at all of it
    assert cost.compute_s == pytest.approx(6 * 5e5 * 1e6 / 0.5e12)
    assert cost.log_probability_s == pytest.approx(2 * 5e5 * 1e6 / 1e12)
    assert cost.total_s == pytest.approx(6.0 + 1.0)
    again = learner.model_copy(update={"recompute": True, "epochs": 2})
    made = training_cost(MODEL, SHEET, again, gpus=2, tokens=1e6, mean_tokens=0.0, link_share=1.0)
    assert made.compute_s == pytest.approx(2 * 8 * 5e5 * 1e6 / 0.5e12 / 2)
    # attention: 4 operations a layer, head and number, over half of the sample
    longer = training_cost(MODEL, SHEET, learner, gpus=1, tokens=1e6, mean_tokens=1e4, link_share=1.0)
    assert longer.log_probability_s == pytest.approx(1.0 + 1e6 * 4 * 2 * 4 * 25 * 5e3 / 1e12)


def test_gathering_inside_a_domain_and_across() -> None:
    assert gather_s(1e8, 1, SHEET, 1.0) == 0.0
    assert gather_s(1e8, 2, SHEET, 0.5) == pytest.approx(0.5 / 0.5)
    # three quarters of it over the link, and once into each domain over its two ports
    assert gather_s(1e8, 4, SHEET, 1.0) == pytest.approx(0.75 + 0.75e8 / 2e7)


def test_traffic_hides_behind_the_computation_or_adds_to_it() -> None:
    learner = SimulatedLearnerConfig(mfu=1.0, recompute=False, tokens_per_gpu=1000, log_probability_passes=1)
    hidden = training_cost(MODEL, SHEET, learner, gpus=2, tokens=4000, mean_tokens=0.0, link_share=1.0)
    # 600,000 parameters of 2 bytes, half of them, at 100 MB/s: 6 ms; three times, two passes
    assert hidden.traffic_s == pytest.approx(36e-3)
    assert hidden.compute_s == pytest.approx(6 * 5e5 * 4000 / 2e12)
    assert hidden.update_s == pytest.approx(36e-3)
    assert hidden.log_probability_s == pytest.approx(12e-3)
    open_ = learner.model_copy(update={"overlap": False})
    shown = training_cost(MODEL, SHEET, open_, gpus=2, tokens=4000, mean_tokens=0.0, link_share=1.0)
    assert shown.update_s == pytest.approx(36e-3 + 6e-3)
    whole = learner.model_copy(update={"sharded": False})
    copies = training_cost(MODEL, SHEET, whole, gpus=2, tokens=4000, mean_tokens=0.0, link_share=1.0)
    assert copies.traffic_s == pytest.approx(12e-3)


def test_publication_by_hand() -> None:
    assert publication_s(5e7, sheet=SHEET, link_share=0.5, colocated=False) == pytest.approx(5e7 / 0.5e7)
    assert publication_s(5e7, sheet=SHEET, link_share=0.5, colocated=True) == pytest.approx(1.0)


def roofline(gpus: int = 1) -> Roofline:
    reached = Reached(memory=1.0, compute=1.0, link=1.0, layer_s=0.0, collective_s=0.0)
    return Roofline(model=MODEL, sheet=SHEET, gpus=gpus, precision="bf16", cache_bytes=2.0, reached=reached)


def test_memory_by_hand() -> None:
    # of 9 MB weights take 1.2; a sample of 1000 tokens 400 kB
    assert most_slots(roofline(), None, context_tokens=1000, spare_memory=0.1) == 19
    # two GPUs hold half of each
    assert most_slots(roofline(2), None, context_tokens=1000, spare_memory=0.1) == 42
    # a drafter of the same size, whole on its GPU
    assert most_slots(roofline(), roofline(), context_tokens=1000, spare_memory=0.1) == 8
    fit = memory_fit(
        roofline(), None, slots=19, context_tokens=1000, spare_memory=0.1, trainer_gpus=1, sharded=True
    )
    assert fit.weights == pytest.approx(1.2e6) and fit.caches == pytest.approx(7.6e6)
    assert fit.instance_fits
    # 16 bytes of 600,000 parameters
    assert fit.training == pytest.approx(9.6e6) and not fit.trainer_fits
    spread = memory_fit(
        roofline(), None, slots=1, context_tokens=1000, spare_memory=0.1, trainer_gpus=2, sharded=True
    )
    assert spread.training == pytest.approx(4.8e6 + 0.6e6) and spread.trainer_fits


def test_an_instance_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds no sample.*raise pools\.tensor_parallel"):
        most_slots(roofline(), None, context_tokens=1e6, spare_memory=0.1)
