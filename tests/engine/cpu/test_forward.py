"""A forward in one call: the values of library calls, whatever was computed before, in either type of weights."""

import pytest
import torch
from torch import Tensor

from rlhfspec.engine.attention.backends import sdpa_attention
from rlhfspec.engine.model import compute_backend
from rlhfspec.engine.model.llama_forward import LlamaForward
from rlhfspec.engine.model.prefill_plan import PrefillPiece, PrefillPlan
from rlhfspec.engine.model.runner import ModelRunner
from tests.helpers.backends import own_backend

VARIANTS = {
    "llama": {},
    "one query for each KV head": {"num_key_value_heads": 4},
    "gates that are no whole panels": {"intermediate_size": 100},
    "tied": {"tie_word_embeddings": True},
}


def runner_of(model, *, prepack: bool = True) -> ModelRunner:
    runner = ModelRunner(model, num_slots=4, capacity=160, backend=own_backend(), vocab_size=64)
    if not prepack:
        runner.stop_prepacking()
    return runner


def native_of(runner: ModelRunner):
    assert isinstance(runner._forward, LlamaForward)
    return runner._forward.fused


def logits_of(runner: ModelRunner, lengths: tuple[int, ...]) -> Tensor:
    """Of prompts of such lengths in slots 0, 1, .., in one forward."""
    pieces = [PrefillPiece(slot=slot, start=0, length=length) for slot, length in enumerate(lengths)]
    plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=pieces)
    ids = torch.arange(sum(lengths)) * 7 % 64
    positions = torch.cat([torch.arange(length) for length in lengths])
    return runner.logits(ids, positions, plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_equals_library_calls(monkeypatch, new_model, variant: str, dtype: str) -> None:
    # library products in float32, as on a processor without bfloat16 instructions
    monkeypatch.setattr(compute_backend, "has_bfloat16", lambda: False)
    native = runner_of(new_model(1, dtype, **VARIANTS[variant]))
    library = runner_of(new_model(1, dtype, **VARIANTS[variant]), prepack=False)
    assert native_of(native) is not None
    assert native_of(library) is None
    expected = logits_of(library, (20, 3))
    torch.testing.assert_close(logits_of(native, (20, 3)), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(native.pool.cells, library.pool.cells, rtol=1e-4, atol=1e-4)


def test_room_grows_and_what_was_before_does_not_matter(new_model) -> None:
    runner = runner_of(new_model(1, "float32"))
    first = logits_of(runner, (5,))
    long = logits_of(runner, (100, 90, 3))
    assert torch.equal(logits_of(runner, (5,)), first)
    assert torch.equal(logits_of(runner_of(new_model(1, "float32")), (100, 90, 3)), long)


def test_a_fill_writes_what_a_forward_writes(new_model) -> None:
    filled, forwarded = (runner_of(new_model(1, "float32")) for _ in range(2))
    pieces = [PrefillPiece(slot=2, start=0, length=12), PrefillPiece(slot=0, start=0, length=70)]
    ids, positions = torch.arange(82) % 64, torch.cat([torch.arange(12), torch.arange(70)])
    for runner, run in ((filled, filled.fill), (forwarded, forwarded.logits)):
        runner.pool.cells.zero_()
        run(ids, positions, PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=pieces))
    assert torch.equal(filled.pool.cells, forwarded.pool.cells)
    assert filled.pool.cells[:, :, 0, :, :70].any() and not filled.pool.cells[:, :, 1].any()


def test_another_attention_takes_the_library_s_way(new_model) -> None:
    model = new_model(1, "float32")
    runner = ModelRunner(
        model, num_slots=4, capacity=160, backend=own_backend(), attention=sdpa_attention, vocab_size=64
    )
    expected = logits_of(runner_of(model), (20, 3))
    torch.testing.assert_close(logits_of(runner, (20, 3)), expected, rtol=1e-4, atol=1e-4)


def test_an_unknown_token_or_position_is_refused(new_model) -> None:
    runner = runner_of(new_model(1, "float32"))
    piece = [PrefillPiece(slot=0, start=0, length=1)]
    for ids, positions in ((torch.tensor([64]), torch.tensor([0])), (torch.tensor([0]), torch.tensor([160]))):
        plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=piece)
        with pytest.raises(IndexError):
            runner.logits(ids, positions, plan)
