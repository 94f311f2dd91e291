"""Whole decode steps recorded: the same bits as steps that run as they come, and nothing that a capture forbids."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhfspec.core.records import Completion, SampleKey, SamplingParams
from rlhfspec.engine.attention.by_length import split_attention
from rlhfspec.engine.attention.visibility import count_up
from rlhfspec.engine.cache.kv_pool import KVPool
from rlhfspec.engine.cuda import row_operators  # noqa: F401 (defines the operator)
from rlhfspec.engine.decoding.draft_tree import _line, root_only
from rlhfspec.engine.decoding.noise import NoiseSource
from rlhfspec.engine.drafters.level_drafter import noise_at_level
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.cuda_graphs import ForwardGraphs, Recorder, Run
from rlhfspec.engine.recorded_step import FixedBatch, StepRecordings
from tests.engine.model.test_capture_legality import LawfulRecorder
from tests.engine.model.test_cuda_graphs import TapeRecorder
from tests.engine.test_losslessness import PROMPT_LENGTHS, Make, MakeRequests, assert_equal
from tests.helpers.backends import torch_backend

SAMPLINGS = {
    "hot": SamplingParams(max_new_tokens=9, temperature=0.7),
    "greedy": SamplingParams(max_new_tokens=9, temperature=0.0),
    "filtered": SamplingParams(max_new_tokens=9, top_p=0.8, top_k=20, min_p=0.05),
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens are moved without a look at which; the CPU looks."""
    monkeypatch.setattr(KVPool, "make_dense", KVPool.make_dense_unseen)


class HashedOnDemand(NoiseSource):
    """As on a GPU, where noise is made of words that lie there, a step's at a time."""

    ahead = False


class WarmRecorder(LawfulRecorder):
    """Runs once before it records: tables that are kept are made then."""

    def record(self, run: Run) -> Run:
        run()
        return super().record(run)


def backend() -> ComputeBackend:
    made = torch_backend()
    made.noise = HashedOnDemand(made.device)
    return made


def recorded(engine: Engine, recorder: Recorder, *, max_bytes: int = 1 << 20) -> StepRecordings:
    steps = StepRecordings(recorder, max_bytes=max_bytes)
    engine._decode = steps
    return steps


@pytest.fixture(scope="module")
def plain(make_engine: Make, make_requests: MakeRequests) -> Callable[[str], Sequence[Completion]]:
    """Plain decoding of the same requests, made once."""

    @cache
    def of(sampling: str) -> Sequence[Completion]:
        engine = make_engine("off", backend=backend(), batch=7)
        return engine.generate(make_requests(PROMPT_LENGTHS, SAMPLINGS[sampling]))

    return of


@pytest.mark.parametrize(
    ("plan", "sampling"),
    [("off", "hot"), ("chain4", "greedy"), ("tree8", "hot"), ("tree8", "filtered"), ("tree16", "hot")],
)
def test_replayed_steps_change_no_bit(
    make_engine: Make,
    make_requests: MakeRequests,
    plain: Callable[[str], Sequence[Completion]],
    plan: str,
    sampling: str,
) -> None:
    make = partial(make_engine, backend=backend(), batch=7)
    requests = make_requests(PROMPT_LENGTHS, SAMPLINGS[sampling])
    engine, recorder = make(plan), TapeRecorder()
    steps = recorded(engine, recorder)
    assert_equal(engine.generate(requests), plain(sampling))
    assert recorder.replays > 2 * len(steps.shapes) > 0
    assert {shape.num_samples for shape in steps.shapes} <= {1, 2, 4, 7}
    assert plan == "off" or engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("plan", ["off", "chain4", "tree8"])
@pytest.mark.parametrize("whole", [True, False])
def test_where_attention_goes_by_lengths_a_recording_serves_every_length(
    make_engine: Make,
    make_requests: MakeRequests,
    plain: Callable[[str], Sequence[Completion]],
    plan: str,
    whole: bool,
) -> None:
    engine, recorder = make_engine(plan, backend=backend(), batch=7), TapeRecorder()
    runners = [engine.runner] if engine.drafter is None else [engine.runner, engine.drafter.runner]  # type: ignore[attr-defined]
    for runner in runners:
        runner.attention = split_attention
        runner.graphs = None if whole else ForwardGraphs(recorder, max_bytes=1 << 20)
    steps = recorded(engine, recorder) if whole else engine.runner.graphs
    got = engine.generate(make_requests(PROMPT_LENGTHS, SAMPLINGS["hot"]))
    assert [one.token_ids.tolist() for one in got] == [one.token_ids.tolist() for one in plain("hot")]
    assert steps is not None and recorder.replays > 2 * len(steps.shapes) > 0
    views = {shape.reach_tokens if whole else shape.view_tokens for shape in steps.shapes}
    assert views == {engine.runner.pool.capacity}


def test_steps_that_are_begun_before_the_last_is_read_change_no_bit(
    make_engine: Make, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops inside, limits, joins, leaves, preemption, and moves to another engine and back."""
    make, hot = partial(make_engine, backend=backend()), SamplingParams(max_new_tokens=22, temperature=0.8)
    lengths = (3, 119, 17, 127, 60, 100, 1, 33, 9)
    whole = make("off", batch=9).generate(make_requests(lengths, hot))
    samplings = [
        replace(hot, stop_token_ids=(int(one.token_ids[2 * index]),)) if index % 2 else hot
        for index, one in enumerate(whole)
    ]
    requests = make_requests(lengths, samplings)
    expected = make("off", batch=9).generate(requests)
    assert {len(one.token_ids) for one in expected} > {22}, "some stop inside"

    uploads: list[FixedBatch] = []
    follow = FixedBatch.follow
    monkeypatch.setattr(FixedBatch, "follow", lambda self, of: uploads.append(self) or follow(self, of))
    engines = [make("off", batch=4), make("off", batch=3)]
    begun, done, num_steps, num_moves = 0, dict[SampleKey, Completion](), 0, 0
    for engine in engines:
        recorded(engine, TapeRecorder())
    for request in requests:
        engines[0].submit(request)
    while any(engine.has_work for engine in engines):
        num_steps += 1
        for source, target in (engines, engines[::-1]) if num_steps % 6 == 0 else ():
            if source.num_running > 1 and target.num_running < target.runner.pool.num_slots:
                key = list(source.progress())[num_steps % source.num_running]
                state, pieces = source.exchange.detach(key, weight_version=0, shipped={"target": 0})
                target.exchange.attach(state, pieces)
                num_moves += 1
        if num_steps % 10 == 0 and engines[0].num_running > 1:
            engines[0].exchange.preempt(1, weight_version=0)
        for engine in engines:
            if engine.has_work:
                done |= {one.key: one for one in engine.step()}
                begun += engine._has_next
    assert_equal([done[request.key] for request in requests], expected)
    assert num_moves > 4 and begun > len(uploads) > num_moves, "most steps need nothing of the host"


def test_samples_that_sample_unlike_share_a_recorded_step(
    make_engine: Make, make_requests: MakeRequests
) -> None:
    make = partial(make_engine, backend=backend(), batch=4)
    lengths = PROMPT_LENGTHS[:4]
    requests = make_requests(lengths, [list(SAMPLINGS.values())[index % 3] for index in range(len(lengths))])
    engine = make("tree8")
    recorded(engine, TapeRecorder())
    assert_equal(engine.generate(requests), make("off").generate(requests))


@pytest.mark.parametrize(
    ("plan", "sampling"), [("off", "filtered"), ("chain4", "hot"), ("tree8", "filtered")]
)
def test_a_recorded_step_does_nothing_that_a_capture_forbids(
    make_engine: Make,
    make_requests: MakeRequests,
    plain: Callable[[str], Sequence[Completion]],
    plan: str,
    sampling: str,
) -> None:
    make = partial(make_engine, backend=backend(), batch=7)
    requests = make_requests(PROMPT_LENGTHS, SAMPLINGS[sampling])
    engine, recorder = make(plan), WarmRecorder()
    recorded(engine, recorder)
    assert_equal(engine.generate(requests), plain(sampling))
    assert recorder.num_runs > 8 and recorder.num_calls > 20 * recorder.num_runs


def test_the_last_tokens_before_a_caches_end_run_unrecorded(
    make_engine: Make, make_requests: MakeRequests
) -> None:
    """A wide draft has more columns than nodes: its recording would write behind the cache."""
    make = partial(make_engine, backend=backend(), batch=2, max_total_tokens=70)
    requests = make_requests((12, 40), SamplingParams(max_new_tokens=30))
    engine = make("tree16")
    steps = recorded(engine, TapeRecorder())
    assert_equal(engine.generate(requests), make("off").generate(requests))
    assert steps.shapes


def test_a_spent_budget_leaves_further_steps_unrecorded(
    make_engine: Make, make_requests: MakeRequests, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(make_engine, backend=backend(), batch=3)
    requests = make_requests((3, 100, 17), SamplingParams(max_new_tokens=40))
    engine = make("off")
    steps = recorded(engine, TapeRecorder(bytes_each=400_000), max_bytes=300_000)
    with caplog.at_level(logging.WARNING):
        done = engine.generate(requests)
    assert_equal(done, make("off").generate(requests))
    assert len(steps.shapes) == 1 and "engine.graph_memory_mb" in caplog.text


@pytest.mark.parametrize("plan", ["suffix", "head chain", "model pair"])
def test_drafts_that_the_host_takes_part_in_run_as_they_come(
    make_engine: Make, make_requests: MakeRequests, plan: str
) -> None:
    make = partial(make_engine, backend=backend())
    requests = make_requests((5, 9), SAMPLINGS["hot"])
    engine = make(plan)
    steps = recorded(engine, TapeRecorder())
    assert_equal(engine.generate(requests), make("off").generate(requests))
    drafted = [shape for shape in steps.shapes if shape.plan]
    assert not drafted


def test_padding_samples_write_into_slots_that_nobody_has(
    make_engine: Make, make_requests: MakeRequests
) -> None:
    engine = make_engine("tree8", backend=backend(), batch=8)
    recorded(engine, TapeRecorder())
    for request in make_requests((5, 9, 12), SamplingParams(max_new_tokens=30)):
        engine.submit(request)
    engine.step()
    pool = engine.runner.pool
    before = pool.cells[:, :, :3].clone()
    lengths = [len(state) for state in (range(5), range(9), range(12))]
    for _ in range(3):
        engine.step()
    assert engine.num_running == 3 and torch.isfinite(pool.cells).all()
    for slot, length in enumerate(lengths):
        assert torch.equal(pool.cells[:, :, slot, :, :length], before[:, :, slot, :, :length])
    assert not pool.cells[:, :, 4:].any(), "a recording of four samples has one of padding"


class OutsideReads(TorchDispatchMode):
    """Notes the storages that are read and were not made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, StorageWeakRef] = {}
        self._inside: list[torch.Tensor] = []
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self._made:
                storage = one.untyped_storage()
                self.outside[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self.outside:
                self._made.add(one.untyped_storage()._cdata)
                # an address that is given back would be somebody else's
                self._inside.append(one)
        return result


class ForgetfulRecorder:
    """Keeps of what it records the result alone, as a CUDA graph does, and knows what a replay would read."""

    held_bytes = 0

    def __init__(self) -> None:
        self.read: list[StorageWeakRef] = []

    def record(self, run: Run) -> Run:
        with OutsideReads() as reads:
            result = run()
        self.read += reads.outside.values()
        return lambda: result


@pytest.mark.parametrize("plan", ["off", "chain4", "tree8"])
def test_what_a_replay_reads_stays_however_many_other_tables_are_made(
    make_engine: Make, make_requests: MakeRequests, plan: str
) -> None:
    engine, recorder = make_engine(plan, backend=backend(), batch=7), ForgetfulRecorder()
    recorded(engine, recorder)
    engine.generate(make_requests(PROMPT_LENGTHS, SAMPLINGS["hot"]))
    cpu = torch.device("cpu")
    for number in range(1, 2000):
        count_up(number, cpu)
        root_only(number, cpu)
        _line(1, number % 40 + 1, number // 40, cpu)
        noise_at_level(1, number, 0, cpu)
    gc.collect()
    assert len(recorder.read) > 20
    assert not [one for one in recorder.read if one.expired()]


def test_no_cost_model_learns_how_long_a_recording_took(
    make_engine: Make, make_requests: MakeRequests
) -> None:
    class SlowRecorder(TapeRecorder):
        def record(self, run: Run) -> Run:
            now[0] += 1000.0
            return super().record(run)

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    now = [0.0]
    engine, recorder = make_engine("chain4", backend=backend(), batch=2), SlowRecorder()
    engine._clock, engine.step_log = clock, []
    recorded(engine, recorder)
    engine.generate(make_requests(PROMPT_LENGTHS[:2], SAMPLINGS["hot"]))
    records = engine.step_log
    assert records and now[0] > 1000.0 and max(record.step_s for record in records) < 1.0
