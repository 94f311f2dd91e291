"""Recorded decode forwards: the same bits as running each forward, whatever the batch, tree and view.

A recording on the CPU is a tape: the very kernels of one run, on the addresses they had. What a step must copy in
and did not is stale then, as in a CUDA graph.
"""

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model import cuda_graphs
from rlhfspec.engine.model.cuda_graphs import ForwardGraphs, Recorder, Run, StepShape, shape_of
from rlhfspec.engine.model.forward_plan import TreePlan
from rlhfspec.engine.recorded_step import StepRecordings
from tests.engine.conftest import Pair
from tests.engine.model.test_capture_legality import HOST_READS
from tests.engine.test_losslessness import PROMPT_LENGTHS, Make, MakeRequests, assert_equal
from tests.helpers.backends import torch_backend


@pytest.fixture
def make_engine(make_engine: Make) -> Make:
    """As on a GPU: a tape cannot see code of our own."""
    return partial(make_engine, backend=torch_backend())


class Tape(TorchDispatchMode):
    """Notes every operation, what it was given and what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, tuple, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"{name}: what the host read would stay that of the recording"
        result = func(*args, **(kwargs or {}))
        self._noted.append((func, args, kwargs or {}, result))
        return result

    def again(self, of: torch.Tensor) -> torch.Tensor:
        """Run all once more; return what `of` is then. Tensors that were not made inside are read where they lie."""
        made: dict[int, Any] = {}

        def now(given: Any) -> Any:
            if isinstance(given, torch.Tensor):
                return made.get(id(given), given)
            return type(given)(map(now, given)) if isinstance(given, list | tuple) else given

        for func, args, kwargs, before in self._noted:
            done = func(*now(args), **{name: now(value) for name, value in kwargs.items()})
            made.update(zip(map(id, tree_leaves(before)), tree_leaves(done), strict=True))
        return now(of)


class TapeRecorder:
    """Kernels as one run called them."""

    def __init__(self, bytes_each: int = 1) -> None:
        self.held_bytes = 0
        self.replays = 0
        self._bytes_each = bytes_each

    def record(self, run: Run) -> Run:
        with Tape() as tape:
            first = run()
        result = first.clone()
        self.held_bytes += self._bytes_each

        def replay() -> torch.Tensor:
            self.replays += 1
            return result.copy_(tape.again(first))

        return replay


def recorded(engine: Engine, recorder: Recorder, *, max_bytes: int = 1 << 20) -> Engine:
    runners = [engine.runner]
    if engine.drafter is not None:
        runners.append(engine.drafter.runner)  # type: ignore[attr-defined]
    for runner in runners:
        runner.graphs = ForwardGraphs(recorder, max_bytes=max_bytes)
    return engine


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [("off", "float32"), ("chain4", "float32"), ("tree8", "float32"), ("tree8", "bfloat16")],
)
def test_replays_change_no_bit(make_engine: Make, make_requests: MakeRequests, plan: str, dtype: str) -> None:
    requests = make_requests(PROMPT_LENGTHS, SamplingParams(max_new_tokens=12))
    recorder = TapeRecorder()
    engine = recorded(make_engine(plan, dtype=dtype, batch=7), recorder)
    assert_equal(engine.generate(requests), make_engine("off", dtype=dtype).generate(requests))
    graphs = engine.runner.graphs
    assert graphs is not None
    assert recorder.replays > 2 * len(graphs.shapes)
    # seven slots: five samples and six are padded to seven
    assert engine.runner.recorded_samples == (1, 2, 4, 7)
    assert {shape.num_samples for shape in graphs.shapes} <= {1, 2, 4, 7}
    assert {shape.view_tokens for shape in graphs.shapes} <= {128, 192, 224}


def test_a_spent_budget_leaves_further_shapes_unrecorded(
    make_engine: Make, make_requests: MakeRequests, caplog: pytest.LogCaptureFixture
) -> None:
    requests = make_requests((3, 100, 17), SamplingParams(max_new_tokens=60))
    engine = recorded(make_engine("off", batch=3), TapeRecorder(bytes_each=400_000), max_bytes=300_000)
    with caplog.at_level(logging.WARNING):
        done = engine.generate(requests)
    assert_equal(done, make_engine("off").generate(requests))
    graphs = engine.runner.graphs
    assert graphs is not None
    # the first recording crosses the line; the view grows to more than 128 tokens
    assert len(graphs.shapes) == 1
    assert len([r for r in caplog.records if "engine.graph_memory_mb" in r.message]) == 1


def test_what_was_recorded_reads_new_weights_where_the_old_ones_lay(
    make_engine: Make, make_requests: MakeRequests, new_model
) -> None:
    requests = make_requests((5, 9), SamplingParams(max_new_tokens=8))
    other = new_model(2, "float32")
    recorder = TapeRecorder()
    engine = recorded(make_engine("off"), recorder)
    before = engine.generate(requests)
    held = recorder.held_bytes
    engine.runner.load(dict(other.state_dict()))
    assert recorder.held_bytes == held > 0
    after = engine.generate(requests)
    assert recorder.held_bytes == held, "nothing was recorded anew"
    assert [c.token_ids.tolist() for c in before] != [c.token_ids.tolist() for c in after]
    assert_equal(after, make_engine("off", pair=_pair_of(other)).generate(requests))


def test_padding_samples_write_only_to_the_end_of_their_slot(
    make_engine: Make, make_requests: MakeRequests
) -> None:
    engine = recorded(make_engine("chain4", batch=8), TapeRecorder())
    pool = engine.runner.pool
    for request in make_requests((5, 9, 12), SamplingParams(max_new_tokens=30)):
        engine.submit(request)
    engine.step()
    pool.cells[:, :, 3:] = 7.0
    for _ in range(3):
        engine.step()
    assert engine.num_running == 3
    assert (pool.cells[:, :, 3:, :, :-1] == 7.0).all()
    assert (pool.cells[:, :, 3, :, -1] != 7.0).any(), "the fourth sample of the recording is padding"


@pytest.mark.parametrize(
    ("samples", "view", "expected"),
    [(1, 20, (1, 128)), (3, 128, (4, 128)), (9, 130, (12, 192)), (20, 180, (20, 192))],
)
def test_shapes_are_rounded_up_within_the_pool(
    make_engine: Make, samples: int, view: int, expected: tuple[int, int]
) -> None:
    runner = make_engine("off", batch=20, max_total_tokens=190).runner
    plan = TreePlan(
        pool=runner.pool,
        attention=runner.attention,
        base=torch.zeros(samples, dtype=torch.int64),
        num_tokens=2,
        view_tokens=view,
    )
    assert shape_of(plan) == StepShape(expected[0], 2, expected[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU: not run")
def test_cuda_graphs_change_no_bit(make_requests: MakeRequests, new_model) -> None:
    requests = make_requests(PROMPT_LENGTHS, SamplingParams(max_new_tokens=20))

    def engine(graph_memory_mb: int) -> Engine:
        return build_engine(
            copy.deepcopy(new_model(1, "float32")),
            None,
            engine=EngineConfig(device="cuda", max_running_samples=8, graph_memory_mb=graph_memory_mb),
            speculation=SpeculationConfig(policy="off"),
            max_total_tokens=192,
        )

    with_graphs = engine(256)
    assert_equal(with_graphs.generate(requests), engine(0).generate(requests))
    assert isinstance(with_graphs._decode, StepRecordings) and with_graphs._decode.shapes


def _pair_of(model: PreTrainedModel) -> Pair:
    return Pair(target=model, draft=model)


def test_all_recorders_warm_up_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library keeps a workspace, 32 MiB on a Hopper, for every stream that it ever saw."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    cuda_graphs._aside.cache_clear()
    device = torch.device("cuda", 0)
    assert cuda_graphs._aside(device) is cuda_graphs._aside(torch.device("cuda", 0))
    assert made == [device]
    cuda_graphs._aside.cache_clear()
