"""Our own forward: follows the weights, rounds alike for odd shapes, falls back where prepacking does not hold."""

import copy

import pytest
import torch
from torch import Tensor

from core.config import EngineConfig, SpeculationConfig
from core.errors import ModelError, NumericsError
from engine.attention.backends import ordered_attention
from engine.build import build_engine
from engine.cpu import jit as machine
from engine.cpu.forward import NativeForward
from engine.cpu.segments import Segments
from engine.model import linears
from engine.model.invariance_probe import prove_invariance
from engine.model.linears import MatrixLinear, PrepackedLinear, StreamedLinear, compute_dtype, make_linear
from engine.model.llama_forward import LlamaForward, can_serve
from engine.model.prefill_plan import PrefillPiece, PrefillPlan
from engine.model.runner import ModelRunner

IDS = torch.arange(20) * 7 % 64


def runner_of(model, **options: bool) -> ModelRunner:
    return ModelRunner(
        model, num_slots=4, capacity=160, attention=ordered_attention, vocab_size=64, **options
    )


def causal_logits(runner: ModelRunner, ids: Tensor) -> Tensor:
    plan = PrefillPlan(
        pool=runner.pool,
        attention=runner.attention,
        pieces=[PrefillPiece(slot=0, start=0, length=len(ids))],
    )
    return runner.logits(ids, torch.arange(len(ids)), plan)


def test_loaded_weights_are_used(new_model) -> None:
    model, other = new_model(1, "float32"), new_model(2, "float32")
    runner = runner_of(copy.deepcopy(model))
    before = causal_logits(runner, IDS)
    runner.load(dict(other.state_dict()))
    after = causal_logits(runner, IDS)
    assert not torch.equal(before, after)
    assert torch.equal(after, causal_logits(runner_of(other), IDS))


def test_an_inner_size_that_no_library_likes_is_served(new_model) -> None:
    """Library products round differently in company at an inner size of 100."""
    assert prove_invariance(runner_of(new_model(1, "float32", intermediate_size=100)), max_nodes=8)


def test_what_it_does_not_know_is_left_to_the_stock_module(new_model) -> None:
    model = new_model(1, "float32")
    assert can_serve(model)
    model.config.hidden_act = "gelu"
    assert not can_serve(model)


def test_a_wrong_forward_is_refused(new_model, monkeypatch) -> None:
    """The comparison with the model's own forward stands between a mistake here and a sample."""
    monkeypatch.setattr("engine.model.llama_layout._pairs_together", lambda x, *, dim: x)
    with pytest.raises(ModelError, match="differ from its own forward's"):
        runner_of(new_model(1, "float32"))


@pytest.mark.parametrize("kind", [MatrixLinear, PrepackedLinear, StreamedLinear])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("columns", [96, 99])
def test_linears_equal_the_formula(kind: type, with_bias: bool, columns: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(5, 64, generator=generator), torch.randn(5, columns, generator=generator)
    weight = torch.randn(columns, 64, generator=generator)
    bias = torch.randn(columns, generator=generator) if with_bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    linear = kind(weight, bias)
    torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=1e-4)
    added = residual.double() + expected
    torch.testing.assert_close(linear.add_to(residual.clone(), x).double(), added, rtol=0, atol=1e-4)


def test_the_layout_goes_by_type_shape_and_threads(monkeypatch) -> None:
    weight = torch.randn(1024, 512, generator=torch.Generator().manual_seed(4))
    assert isinstance(make_linear(weight, prepack=True), StreamedLinear)
    assert isinstance(make_linear(weight, prepack=False), MatrixLinear)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert isinstance(make_linear(weight, prepack=True), PrepackedLinear)
    assert isinstance(make_linear(weight[:32], prepack=True), MatrixLinear)
    monkeypatch.setattr(linears, "can_prepack", lambda: False)
    assert isinstance(make_linear(weight, prepack=True), MatrixLinear)


def test_a_process_that_cannot_compile_takes_library_products(monkeypatch, caplog) -> None:
    def refused(*_, **__) -> None:
        raise RuntimeError("no executable memory")

    monkeypatch.setattr(machine, "compile_modules", refused)
    machine.can_make_code.cache_clear()
    assert isinstance(make_linear(torch.randn(1024, 512), prepack=True), PrepackedLinear)
    assert "no executable memory" in caplog.text
    machine.can_make_code.cache_clear()


@pytest.mark.parametrize("kind", [PrepackedLinear, StreamedLinear])
def test_rows_round_alike_in_any_company(kind: type) -> None:
    weight = torch.randn(1024, 512, generator=torch.Generator().manual_seed(4))
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(5))
    linear = kind(weight, None)
    for rows in (1, 2, 3, 4, 7, 16, 33):
        assert torch.equal(linear(x[:rows]), linear(x)[:rows])


class NeighbourlyForward(NativeForward):
    """Rounds with the number of rows, as a library's kernel may."""

    def logits(self, num_tokens: int, segments: Segments) -> Tensor:
        return super().logits(num_tokens, segments) * (1.0 + 2.0**-20 * num_tokens)


def test_without_invariant_prepacking_plain_matrices_serve(new_model, monkeypatch) -> None:
    monkeypatch.setattr("engine.model.llama_forward.NativeForward", NeighbourlyForward)
    model = new_model(1, "float32")
    with pytest.raises(NumericsError):
        prove_invariance(runner_of(copy.deepcopy(model)), max_nodes=8)
    engine = build_engine(
        model,
        None,
        engine=EngineConfig(device="cpu", numerics="invariant", max_running_samples=4),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=100,
    )
    assert not engine.runner.prepacked


def test_bfloat16_weights_compute_in_float32_by_our_own_code_or_where_the_cpu_has_no_bfloat16(
    monkeypatch,
) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(linears, "_has_bfloat16", lambda: True)
    assert compute_dtype(torch.bfloat16, cpu) == torch.float32
    monkeypatch.setattr(linears, "serves_thread", lambda device: False)
    for has, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(linears, "_has_bfloat16", lambda has=has: has)
        assert compute_dtype(torch.bfloat16, cpu) == expected
    assert compute_dtype(torch.bfloat16, cuda) == torch.bfloat16
    assert compute_dtype(torch.float32, cpu) == torch.float32


def test_computing_in_float32_stays_close_to_the_bfloat16_module(new_model, monkeypatch) -> None:
    """Both types of computation pass the comparison and agree to bfloat16's rounding."""
    logits = []
    monkeypatch.setattr(linears, "serves_thread", lambda device: False)
    for has in (True, False):
        monkeypatch.setattr(linears, "_has_bfloat16", lambda has=has: has)
        logits.append(causal_logits(runner_of(new_model(1, "bfloat16")), IDS).float().softmax(-1))
    distance = (logits[0] - logits[1]).abs().sum(-1).max() / 2
    assert 0 < float(distance) < 0.05


def test_the_own_forward_is_taken_unless_told_otherwise(new_model) -> None:
    for stock in (False, True):
        runner = runner_of(new_model(1, "float32"), stock=stock)
        assert isinstance(runner._forward, LlamaForward) is not stock


@pytest.mark.parametrize("head_dim", [16, 20, 40, 64])
def test_rotations_round_alike_whatever_the_capacity(new_model, monkeypatch, head_dim: int) -> None:
    """A short pool keeps a table of rotations for all heads, a long one does not."""
    model = new_model(1, "float32", head_dim=head_dim)
    with_table = causal_logits(runner_of(model), IDS)
    monkeypatch.setattr("engine.model.llama_forward.MAX_ROTATION_BYTES", 0)
    assert torch.equal(with_table, causal_logits(runner_of(model), IDS))


def test_a_window_that_the_stock_module_ignores_is_ignored(new_model) -> None:
    """Longer than the start-up comparison looks."""
    windowed = new_model(1, "float32", sliding_window=100)
    ids = torch.arange(150) * 7 % 64
    assert torch.equal(
        causal_logits(runner_of(windowed), ids), causal_logits(runner_of(new_model(1, "float32")), ids)
    )


def test_a_module_keeps_its_own_attention(new_model, monkeypatch) -> None:
    model = new_model(1, "float32")
    before = model.config._attn_implementation
    for stock in (False, True, False):
        runner_of(model, stock=stock)
        assert model.config._attn_implementation == before
    # without products of our own the module itself serves
    monkeypatch.setattr("engine.model.stock_forward.serves_thread", lambda device: False)
    runner_of(model, stock=True)
    served = model.config._attn_implementation
    assert served != before
    runner_of(model)
    assert model.config._attn_implementation == served
