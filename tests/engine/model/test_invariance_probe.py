"""The start-up probe passes where numerics are invariant and names the case where they are not."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import ConfigError, NumericsError
from rlhfspec.engine.attention.backends import (
    ATTENTION,
    Attention,
    ordered_attention,
    reference_attention,
    sdpa_attention,
)
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.compute_backend import ComputeBackend, PoolAttention
from rlhfspec.engine.model.invariance_probe import check_invariance
from rlhfspec.engine.model.runner import ModelRunner
from rlhfspec.engine.numerics import attention_for, describe_numerics, resolve_device, resolve_numerics
from tests.helpers.backends import own_backend, torch_backend

HEADS = 2
"KV heads of the pair's target: attention sees one row for each sample and head."


def runner_of(pair, attention: Attention | None = None, capacity: int = 350) -> ModelRunner:
    return ModelRunner(
        pair.target,
        num_slots=8,
        capacity=capacity,
        backend=own_backend(),
        attention=attention,
        vocab_size=64,
    )


@pytest.mark.parametrize("attention", [None, ordered_attention], ids=["of the back end", "library"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ordered_attention_passes_across_chunks_batches_and_trees(pairs, dtype: str, attention) -> None:
    passed = "; ".join(check_invariance(runner_of(pairs[dtype], attention), max_nodes=8))
    for case in (
        "prefill in pieces at context 5",
        "batch of 8 at context 126",
        "tree of 8 with decoys in a batch of 8 at context 255",
        "at context 255",
    ):
        assert case in passed


def test_a_small_pool_is_probed_as_far_as_it_goes(pairs) -> None:
    runner = ModelRunner(
        pairs["float32"].target, num_slots=1, capacity=16, backend=own_backend(), vocab_size=64
    )
    assert check_invariance(runner, max_nodes=4)


def test_sdpa_fails(pairs) -> None:
    with pytest.raises(NumericsError, match=r"engine\.numerics=fast"):
        check_invariance(runner_of(pairs["float32"], sdpa_attention), max_nodes=8)


def view_dependent(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, **settings: Any) -> Tensor:
    """Rounds differently under longer views: what a library may do that splits a reduction by its length."""
    out = reference_attention(q, keys, values, bias, **settings)
    return out * (1.0 + 2.0**-22) if keys.shape[1] > 96 else out


def batch_dependent(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, **settings: Any) -> Tensor:
    out = reference_attention(q, keys, values, bias, **settings)
    return out * (1.0 + 2.0**-22) if q.shape[0] > HEADS else out


def company_dependent(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, **settings: Any) -> Tensor:
    """Rounds differently for long prompts in company: decode steps never show it."""
    out = reference_attention(q, keys, values, bias, **settings)
    return out * (1.0 + 2.0**-22) if q.shape[0] > HEADS and settings["rows"] >= 32 else out


def width_dependent(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, **settings: Any) -> Tensor:
    """Rounds differently for more rows than any narrow tree has."""
    out = reference_attention(q, keys, values, bias, **settings)
    return out * (1.0 + 2.0**-22) if settings["rows"] > 50 and bias.shape[-1] <= 96 else out


def test_the_widest_tree_of_the_policy_is_tried(pairs) -> None:
    runner = runner_of(pairs["float32"])
    passed = "; ".join(check_invariance(runner, max_nodes=64))
    assert "tree of 64 with decoys in a batch of 1 at context 5" in passed
    assert "tree of 31 with decoys in a batch of 8 at context 5" in passed
    with pytest.raises(NumericsError, match=r"tree of 64 .* in a batch of 1 at context 5"):
        check_invariance(runner_of(pairs["float32"], width_dependent), max_nodes=64)


def garbling(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, **settings: Any) -> Tensor:
    """Wrong, and by more than rounding, where the comparison does not look: views beyond its own."""
    out = reference_attention(q, keys, values, bias, **settings)
    return -out if keys.shape[1] > 128 else out


def test_fast_numerics_are_offered_only_where_the_difference_is_rounding(pairs) -> None:
    with pytest.raises(NumericsError, match="more than rounding") as raised:
        check_invariance(runner_of(pairs["float32"], garbling), max_nodes=8)
    assert "set engine.numerics=fast" not in str(raised.value)


@pytest.mark.parametrize(
    ("attention", "case"),
    [
        (view_dependent, "view .* longer at context 5"),
        (batch_dependent, "batch of 3"),
        (company_dependent, "lengths prefilled together"),
    ],
)
def test_planted_dependences_are_named(pairs, attention: Attention, case: str) -> None:
    with pytest.raises(NumericsError, match=case):
        check_invariance(runner_of(pairs["float32"], attention), max_nodes=8)


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_the_engine_probes_when_it_promises_invariance(pairs, numerics, monkeypatch) -> None:
    monkeypatch.setitem(ATTENTION, "reference", view_dependent)

    def build():
        return build_engine(
            pairs["float32"].target,
            None,
            engine=EngineConfig(
                device="cpu", numerics=numerics, attention="reference", max_running_samples=2
            ),
            speculation=SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=8),
            max_total_tokens=100,
        )

    if numerics == "fast":
        assert not build().has_work
    else:
        with pytest.raises(NumericsError):
            build()


def test_attention_back_ends_by_config() -> None:
    ours, library = own_backend(), torch_backend()
    for numerics in ("invariant", "fast"):
        assert attention_for(EngineConfig(attention="ordered"), numerics, ours) is ours.attention
    if isinstance(ours.attention, PoolAttention):
        assert attention_for(EngineConfig(), "fast", ours) is ours.attention
    assert attention_for(EngineConfig(), "invariant", ours) is ours.attention
    assert attention_for(EngineConfig(), "invariant", library) is ordered_attention
    assert attention_for(EngineConfig(), "fast", library) is sdpa_attention
    assert attention_for(EngineConfig(attention="ordered"), "fast", library) is ordered_attention
    for name in ("sdpa", "xformers"):
        with pytest.raises(ConfigError, match=f"{name} is not invariant"):
            attention_for(EngineConfig(attention=name), "invariant", ours)


def test_numerics_by_config_and_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_numerics(EngineConfig(), cpu) == "invariant"
    assert resolve_numerics(EngineConfig(), cuda) == "fast"
    assert resolve_numerics(EngineConfig(numerics="invariant"), cuda) == "invariant"
    assert resolve_numerics(EngineConfig(numerics="fast"), cpu) == "fast"
    assert resolve_numerics(EngineConfig(num_threads=2), cpu) == "fast"
    with pytest.raises(ConfigError, match=r"needs engine\.num_threads 1, got 2"):
        resolve_numerics(EngineConfig(numerics="invariant", num_threads=2), cpu)
    assert resolve_device("cpu") == cpu


def test_a_fall_to_fast_numerics_says_why() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert describe_numerics(EngineConfig(), cpu).startswith("invariant: ")
    assert "(engine.num_threads is 3, and" in describe_numerics(EngineConfig(num_threads=3), cpu)
    assert "(engine.numerics says so)" in describe_numerics(EngineConfig(numerics="fast"), cpu)
    assert "(on CUDA" in describe_numerics(EngineConfig(), cuda)


def engine_of(pairs, backend: ComputeBackend, numerics: Literal["auto", "invariant"]) -> Engine:
    return build_engine(
        pairs["float32"].target,
        None,
        engine=EngineConfig(device="cpu", numerics=numerics, max_running_samples=4),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=300,
        backend=backend,
    )


def test_auto_falls_to_fast_numerics_where_library_code_rounds_by_its_company_and_says_why(pairs) -> None:
    backend = torch_backend()
    assert engine_of(pairs, backend, "auto").promise.startswith("invariant: ")
    backend.attention = sdpa_attention
    engine = engine_of(pairs, backend, "auto")
    assert engine.numerics == "fast" and engine.promise.startswith("fast: ")
    assert "(invariant numerics do not hold here: " in engine.promise
    with pytest.raises(NumericsError, match=r"engine\.numerics=fast"):
        engine_of(pairs, backend, "invariant")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_engine_sets_the_threads_that_it_is_built_for(pairs, num_threads: int) -> None:
    """Without being told: torch has two, and the config one, or the other way round."""
    torch.set_num_threads(3 - num_threads)
    try:
        engine = build_engine(
            pairs["float32"].target,
            None,
            engine=EngineConfig(device="cpu", num_threads=num_threads, max_running_samples=2),
            speculation=SpeculationConfig(policy="off"),
            max_total_tokens=60,
        )
        assert torch.get_num_threads() == num_threads
        assert engine.numerics == ("invariant" if num_threads == 1 else "fast")
    finally:
        torch.set_num_threads(1)
