"""Chains in one call: the drafts of single forwards and choices, at any depth, in both types of weights."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.cpu.backend import CpuBackend
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.compute_backend import ComputeBackend
from tests.engine.conftest import Pair
from tests.helpers.backends import CPU, own_backend


class LevelByLevel(CpuBackend):
    """Drafts by single forwards and choices."""

    def chain(self, *_: object, **__: object) -> None:
        return None


def engine_of(pair: Pair, depth: int, backend: ComputeBackend) -> Engine:
    return build_engine(
        pair.target,
        pair.draft,
        engine=EngineConfig(device="cpu", max_running_samples=5, probe=False),
        speculation=SpeculationConfig(policy="fixed", num_nodes=depth, depth=depth),
        max_total_tokens=192,
        backend=backend,
    )


@pytest.mark.parametrize(("dtype", "depth"), [("float32", 4), ("bfloat16", 4), ("float32", 20)])
def test_they_draft_what_single_forwards_draft(
    pairs: dict[str, Pair],
    make_requests: Callable[..., list[SampleRequest]],
    dtype: str,
    depth: int,
) -> None:
    requests = make_requests((9, 30, 4, 100), SamplingParams(max_new_tokens=40))
    runs = []
    for backend in (own_backend(), LevelByLevel(CPU)):
        engine = engine_of(pairs[dtype], depth, backend)
        tokens = [completion.token_ids.tolist() for completion in engine.generate(requests)]
        runs.append((tokens, [r.num_accepted_tokens for r in engine.step_records]))
    assert runs[0] == runs[1]
    assert sum(runs[0][1]) > 0


def test_no_room_is_said_before_anything_is_written(pairs: dict[str, Pair]) -> None:
    runner = engine_of(pairs["float32"], 4, own_backend()).runner
    chain = runner.fused_chain
    assert chain is not None
    one = torch.ones(2)
    noise, logits = torch.zeros(2, 5, runner.vocab_size), torch.zeros(2, runner.vocab_size)
    before = runner.pool.cells.clone()
    with pytest.raises(IndexError, match="are to be written"):
        chain.start(logits, np.array([3, runner.pool.capacity - 3]), noise, one, one)
    assert torch.equal(runner.pool.cells, before)
    chain.start(logits, np.array([3, runner.pool.capacity - 4]), noise, one, one)
    chain.draft(0, 4)
    assert runner.pool.cells[:, :, 1, :, -4:-1].any() and not runner.pool.cells[:, :, 1, :, -1].any()
    assert chain.token_ids(4).shape == (2, 4)
