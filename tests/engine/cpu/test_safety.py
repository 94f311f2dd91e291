"""What code over raw addresses must not do: mix paths, free what is called, trust a global setting or an old cell."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rlhfspec.core.errors import NumericsError
from rlhfspec.core.records import SampleKey, Stream
from rlhfspec.engine.cache.segments import segments_of
from rlhfspec.engine.cpu.noise_on_demand import CpuNoiseSource
from rlhfspec.engine.cpu.program import native_code
from rlhfspec.engine.decoding.noise import key_words
from rlhfspec.engine.model.prefill_plan import PrefillPiece, PrefillPlan
from rlhfspec.engine.model.runner import ModelRunner
from tests.engine.cpu.test_attend import attend, pool_of, tokens_of
from tests.helpers.backends import own_backend


def test_threads_that_compile_at_once_get_one_code() -> None:
    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(native_code, [104] * 8))
    assert all(code is codes[0] for code in codes)


def test_buffers_are_float32_whatever_torch_s_default_is(new_model) -> None:
    """transformers sets it, for all threads, while a model of another type is made."""
    words = key_words(SampleKey(run_seed=1, stream=Stream.EVAL, sample_index=2), np.array([3]))[None]
    make_noise = CpuNoiseSource(torch.device("cpu"))
    expected = make_noise(words, np.array([[3, 4]]), 50).values
    runner = ModelRunner(
        new_model(1, "float32"), num_slots=2, capacity=64, backend=own_backend(), vocab_size=64
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(make_noise(words, np.array([[3, 4]]), 50).values, expected)
        inputs, _ = runner._forward.fused.inputs(100, runner.pool)
        assert inputs.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_masked_cell_that_holds_no_number_changes_nothing() -> None:
    """Left by a sample, or a weight version, that overflowed."""
    outs = []
    for left in (0.0, torch.nan):
        pool = pool_of(16)
        pool.cells[:, :, 1, :, 10:] = left
        # position 9 sees 0 to 9; eight positions are computed at a time
        segment = segments_of(pool, slots=np.array([1]), counts=np.array([1]), starts=np.array([9]))
        outs.append(attend(pool, tokens_of(1, 16), segment))
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


@pytest.mark.parametrize(
    ("counts", "starts", "bases", "columns"), [(0, 3, 3, 2), (1, -1, 3, 2), (2, 60, 155, 9), (2, 159, 3, 2)]
)
def test_spans_outside_the_pool_are_refused(counts: int, starts: int, bases: int, columns: int) -> None:
    with pytest.raises(IndexError, match="4 slots of 160"):
        segments_of(
            pool_of(16),
            slots=np.array([0]),
            counts=np.array([counts]),
            starts=np.array([starts]),
            bases=np.array([bases]),
            seen=torch.ones(1, 2, columns, dtype=torch.bool),
            depth=torch.zeros(1, columns, dtype=torch.int64),
        )


def test_another_number_of_threads_is_refused(new_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model(1, "float32")
    runner = ModelRunner(model, num_slots=2, capacity=64, backend=own_backend(), vocab_size=64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(NumericsError, match="its thread now has 2"):
        runner.load(dict(model.state_dict()))
    plan = PrefillPlan(
        pool=runner.pool,
        attention=runner.attention,
        pieces=[PrefillPiece(slot=0, start=0, length=1)],
    )
    for run in (runner.logits, runner.fill):
        with pytest.raises(NumericsError, match=r"torch\.set_num_threads"):
            run(torch.tensor([1]), torch.tensor([0]), plan)
