"""Our own forward: follows the weights, rounds alike for odd shapes, falls back where prepacking does not hold."""

import copy

import pytest
import torch
from torch import Tensor

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import ModelError, NumericsError
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.invariance_probe import check_invariance
from rlhfspec.engine.model.linears import MatrixLinear, PrepackedLinear, Rows, Same
from rlhfspec.engine.model.llama_forward import LlamaForward
from rlhfspec.engine.model.llama_model import can_serve
from rlhfspec.engine.model.prefill_plan import PrefillPiece, PrefillPlan
from rlhfspec.engine.model.runner import ModelRunner
from tests.helpers.backends import CPU, LAYOUTS, OWN_LAYOUTS, own_backend, stock_products, torch_backend

IDS = torch.arange(20) * 7 % 64


def runner_of(model, **options) -> ModelRunner:
    options = {"backend": own_backend()} | options
    return ModelRunner(model, num_slots=4, capacity=160, vocab_size=64, **options)


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
    assert check_invariance(runner_of(new_model(1, "float32", intermediate_size=100)), max_nodes=8)


def test_what_it_does_not_know_is_left_to_the_stock_module(new_model) -> None:
    model = new_model(1, "float32")
    assert can_serve(model)
    model.config.hidden_act = "gelu"
    assert not can_serve(model)


def test_a_wrong_forward_is_refused(new_model, monkeypatch) -> None:
    """The comparison with the model's own forward stands between a mistake here and a sample."""
    monkeypatch.setattr("rlhfspec.engine.model.linears.pairs_together", lambda x, *, dim: x)
    with pytest.raises(ModelError, match="differ from its own forward's"):
        runner_of(new_model(1, "float32"))


@pytest.mark.parametrize("kind", LAYOUTS)
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


def test_library_layouts_go_by_type_and_shape(monkeypatch) -> None:
    weight = torch.randn(1024, 512, generator=torch.Generator().manual_seed(4))
    backend, plain = torch_backend(), ComputeBackend(CPU, prepack=False)
    assert isinstance(plain.linear(weight, None, torch.float32), MatrixLinear)
    assert isinstance(backend.linear(weight, None, torch.float32), PrepackedLinear)
    assert isinstance(backend.linear(weight[:32], None, torch.float32), MatrixLinear)
    monkeypatch.setattr("rlhfspec.engine.model.compute_backend.can_prepack", lambda: False)
    assert isinstance(backend.linear(weight, None, torch.float32), MatrixLinear)


@pytest.mark.parametrize("kind", [PrepackedLinear, *OWN_LAYOUTS])
def test_rows_round_alike_in_any_company(kind: type) -> None:
    weight = torch.randn(1024, 512, generator=torch.Generator().manual_seed(4))
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(5))
    linear = kind(weight, None)
    for rows in (1, 2, 3, 4, 7, 16, 33):
        assert torch.equal(linear(x[:rows]), linear(x)[:rows])


class NeighbourlyLinear:
    """Rounds with the number of rows, as a library's kernel may."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._of = MatrixLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._of(x) * (1.0 + 2.0**-20 * len(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)

    def take(self, rows: Rows, bias: Tensor | None) -> None:
        self._of.take(rows, bias)

    def holds(self, rows: Rows, bias: Tensor | None) -> Same:
        return self._of.holds(rows, bias)

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        return self._of.unpacked()


class NeighbourlyBackend(ComputeBackend):
    """Lays weights out for such products."""

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        ends: tuple[int, ...] | None = None,
    ) -> NeighbourlyLinear:
        return NeighbourlyLinear(weight.to(dtype), bias)


def test_without_invariant_prepacking_plain_matrices_serve(new_model) -> None:
    backend = NeighbourlyBackend(CPU)
    model = new_model(1, "float32")
    with pytest.raises(NumericsError):
        check_invariance(runner_of(copy.deepcopy(model), backend=backend), max_nodes=8)
    engine = build_engine(
        model,
        None,
        engine=EngineConfig(device="cpu", numerics="invariant", max_running_samples=4),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=100,
        backend=backend,
    )
    assert not engine.runner.prepacked


def test_bfloat16_is_computed_in_float32_where_the_processor_has_no_bfloat16(monkeypatch) -> None:
    cuda = ComputeBackend(torch.device("cuda"))
    for has, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("rlhfspec.engine.model.compute_backend.has_bfloat16", lambda has=has: has)
        assert torch_backend().compute_dtype(torch.bfloat16) == expected
        assert torch_backend().compute_dtype(torch.float32) == torch.float32
        assert cuda.compute_dtype(torch.bfloat16) == torch.bfloat16
        if own_backend().widens_bfloat16:
            assert own_backend().compute_dtype(torch.bfloat16) == torch.float32


def test_computing_in_float32_stays_close_to_the_bfloat16_module(new_model, monkeypatch) -> None:
    """Both types of computation pass the comparison and agree to bfloat16's rounding."""
    logits = []
    for has in (True, False):
        monkeypatch.setattr("rlhfspec.engine.model.compute_backend.has_bfloat16", lambda has=has: has)
        runner = runner_of(new_model(1, "bfloat16"), backend=torch_backend())
        logits.append(causal_logits(runner, IDS).float().softmax(-1))
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
    monkeypatch.setattr("rlhfspec.engine.model.llama_forward.MAX_ROTATION_BYTES", 0)
    assert torch.equal(with_table, causal_logits(runner_of(model), IDS))


def test_a_window_that_the_stock_module_ignores_is_ignored(new_model) -> None:
    """Longer than the start-up comparison looks."""
    windowed = new_model(1, "float32", sliding_window=100)
    ids = torch.arange(150) * 7 % 64
    assert torch.equal(
        causal_logits(runner_of(windowed), ids), causal_logits(runner_of(new_model(1, "float32")), ids)
    )


def test_a_module_keeps_its_own_attention(new_model) -> None:
    model = new_model(1, "float32")
    before = model.config._attn_implementation
    for stock in (False, True, False):
        runner_of(model, stock=stock, backend=stock_products())
        assert model.config._attn_implementation == before
    # without products of a back end the module itself serves
    runner_of(model, stock=True, backend=torch_backend())
    served = model.config._attn_implementation
    assert served != before
    runner_of(model)
    assert model.config._attn_implementation == served
