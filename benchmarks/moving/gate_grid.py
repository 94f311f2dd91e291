"""Is the gate right? Both ways of moving measured over contexts, cold and warm pairs, and throttled bandwidth.

A way's cost is the time from the scheduler's order to its word that the sample runs at the destination. The gate
learns from calibration moves of other contexts, then chooses for every cell of the grid.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Protocol

import numpy as np
import ray

from ...core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from ...core.errors import WaitTimeout
from ...core.records import SampleKey, Stream
from ...policies.migration.move_messages import MoveOutcome
from ...policies.reallocation.gate import Gate
from ...policies.reallocation.pool_records import Move, MoveMode
from ...policies.scheduling.events import MoveRecord
from ..support.actor_pool import ActorPool, ask
from ..support.workload import Workload
from .downtime import wide_workload

CONTEXTS = (16, 128, 512, 2048)
CALIBRATION_CONTEXTS = (24, 12, 24, 64, 20, 96, 24, 12, 192, 32, 384, 1024, 1536)
"A rollout shows the gate hundreds of moves; short contexts take some 30 ms either way, and vary by a tenth."
BANDWIDTHS = (float("inf"), 30e6, 8e6)
CLOSE_ENOUGH = 0.05
"Ways that cost within 5% of each other are both right."
WAIT_S = 60.0
SLACK_S = 0.4
SHORT_CONTEXT = 100
"Both ways take some hundredths of a second, most of it waiting: single moves vary by a seventh."
SHORT_TURNS = 4
"So the ways are measured by turns .."
SHORT_REPEATS = 6
".. and so many times as often in each: two means of 48 moves differ by 3% by chance."
LONG_CONTEXT = 1000
"Shipping it takes seconds at the same pace: measured once."
TOKENS_PER_S = 130.0
"What a sample alone decodes at most: it must outlast its move."


class TimedMove(Protocol):
    """What moves a sample."""

    def __call__(self, context: int, mode: MoveMode, *, cold: bool) -> float:
        """Move one of so many tokens; seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measured cell: seconds by either way, and the gate's choice."""

    context_tokens: int
    bandwidth: float
    cold: bool
    migrate_s: float
    recompute_s: float
    chosen: str

    @property
    def is_right(self) -> bool:
        """The chosen way costs least, or within 5% of it."""
        taken = self.migrate_s if self.chosen == "migrate" else self.recompute_s
        return taken <= min(self.migrate_s, self.recompute_s) * (1.0 + CLOSE_ENOUGH)

    @property
    def best(self) -> str:
        """The way that costs less."""
        return "migrate" if self.migrate_s <= self.recompute_s else "recompute"


def measure_grid(*, repeats: int) -> list[Cell]:
    """Measure every cell and let the gate choose."""
    cells: list[Cell] = []
    for bandwidth in BANDWIDTHS:
        mover = _Mover(bandwidth)
        try:
            cells += _measure(mover, bandwidth, repeats)
        finally:
            mover.close()
    return cells


def _measure(mover: _Mover, bandwidth: float, repeats: int) -> list[Cell]:
    gate = Gate(kv_bytes_per_token=mover.kv_bytes_per_token)
    mover.move(64, MoveMode.MIGRATE, cold=True)
    for number, context in enumerate(CALIBRATION_CONTEXTS):
        mover.teach(gate, context, cold=number % 2 == 1)
    cells: list[Cell] = []
    for context in CONTEXTS:
        seconds = both_ways(mover.move, context, repeats)
        cells += [
            Cell(
                context_tokens=context,
                bandwidth=bandwidth,
                cold=cold,
                migrate_s=typical(seconds[MoveMode.MIGRATE, cold]),
                recompute_s=typical(seconds[MoveMode.RECOMPUTE, False]),
                chosen=str(gate.choose(context, cold=cold)),
            )
            for cold in (False, True)
        ]
    return cells


def both_ways(move: TimedMove, context: int, repeats: int) -> dict[tuple[MoveMode, bool], list[float]]:
    """Seconds of moves by way, and whether the pair was cold; in turns where they differ by less than drift."""
    turns, times = 1, repeats
    if context <= SHORT_CONTEXT:
        turns, times = SHORT_TURNS, SHORT_REPEATS * repeats
    elif context > LONG_CONTEXT:
        times = 1
    ways = (
        (MoveMode.RECOMPUTE, False, max(times, repeats + 1)),
        (MoveMode.MIGRATE, False, times),
        (MoveMode.MIGRATE, True, times),
    )
    seconds: dict[tuple[MoveMode, bool], list[float]] = defaultdict(list)
    for _ in range(turns):
        for mode, cold, count in ways:
            seconds[mode, cold] += [move(context, mode, cold=cold) for _ in range(count)]
    return seconds


def typical(values: Sequence[float]) -> float:
    """The mean of the middle half: as deaf to stragglers as the median, and steadier."""
    quarter = len(values) // 4
    return float(np.mean(np.sort(values)[quarter : len(values) - quarter]))


class _Mover:
    """Two instances, plain decoding; one sample at a time is made, moved once and left to finish."""

    def __init__(self, bandwidth: float) -> None:
        self._workload: Workload = wide_workload(1, prompt_tokens=2048, new_tokens=800)
        self._bandwidth = bandwidth
        self._pool = ActorPool(
            self._workload,
            engine=EngineConfig(max_running_samples=2, probe=False, max_prefill_tokens=512),
            speculation=SpeculationConfig(policy="off"),
            migration=ReallocationConfig(
                timeout_s=20.0, transfer_share=1.0, max_bytes_per_s=bandwidth if isfinite(bandwidth) else None
            ),
        )
        self._scheduler = self._pool.new_scheduler()
        self._num_samples = 0
        config = self._workload.target("float32").config
        heads = config.num_key_value_heads * (
            config.head_dim or config.hidden_size // config.num_attention_heads
        )
        self.kv_bytes_per_token = config.num_hidden_layers * 2 * heads * 4

    def move(self, context: int, mode: MoveMode, *, cold: bool) -> float:
        """Seconds of one move."""
        record = self._move(context, mode, cold=cold)
        return record.ended_s - record.ordered_s

    def teach(self, gate: Gate, context: int, *, cold: bool) -> None:
        """Let the gate see one move of either way, as the scheduler would."""
        record = self._move(context, MoveMode.MIGRATE, cold=cold)
        num_bytes = int(record.metrics["stage1_bytes"] + record.metrics["stage2_bytes"])
        gate.note_transfer(num_bytes=num_bytes, seconds=record.ended_s - record.ordered_s, cold=cold)
        record = self._move(context, MoveMode.RECOMPUTE, cold=False)
        gate.note_prefill(
            num_tokens=int(record.metrics["computed_tokens"]), seconds=record.ended_s - record.ordered_s
        )

    def close(self) -> None:
        ray.kill(self._scheduler)
        self._pool.close()

    def _move(self, context: int, mode: MoveMode, *, cold: bool) -> MoveRecord:
        if cold:
            for handle in self._pool.handles.values():
                ask(handle.close_channels.remote(), "close the channels")
        key = self._start_sample(context, mode)
        source = self._wait_until_running()
        destination = next(name for name in self._pool.handles if name != source)
        order = Move(
            key=key, source=source, destination=destination, mode=mode, gain_s=0.0, reason="measured"
        )
        ask(self._scheduler.move.remote((order,)), "move")
        record = self._wait_for_end(key)
        if record.outcome != MoveOutcome.MOVED:
            raise WaitTimeout(
                waiter="the benchmark",
                waited_for=destination,
                order=f"take over a sample of {context} tokens ({record.outcome}: {record.why_ended})",
                waited_s=record.ended_s - record.ordered_s,
                advice="the sample must outlast its move; give it more new tokens",
            )
        return record

    def _start_sample(self, context: int, mode: MoveMode) -> SampleKey:
        for handle in self._pool.handles.values():
            ask(handle.take_spans.remote(), "forget earlier spans")
        (request,) = self._workload.requests()
        # a source that ships goes on decoding, and the sample must outlast that
        shipping_s = context * self.kv_bytes_per_token / self._bandwidth if mode is MoveMode.MIGRATE else 0.0
        expected_s = SLACK_S + 1.2 * shipping_s
        prompt = replace(request.prompt, token_ids=request.prompt.token_ids[: context - 1])
        sampling = replace(request.sampling, max_new_tokens=min(800, int(TOKENS_PER_S * expected_s)))
        key = SampleKey(run_seed=1, stream=Stream.BENCH, sample_index=self._num_samples)
        self._num_samples += 1
        ask(
            self._scheduler.enqueue.remote((replace(request, key=key, prompt=prompt, sampling=sampling),)),
            "enqueue",
        )
        return key

    def _wait_until_running(self) -> str:
        """The instance that has done a decode step with the sample."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            _require_time(deadline_s, "begin to decode")
            for name, handle in self._pool.handles.items():
                if any(span.kind == "step" for span in ask(handle.take_spans.remote(), "spans")):
                    return name
            time.sleep(0.005)

    def _wait_for_end(self, key: SampleKey) -> MoveRecord:
        """The move's record, once the sample is complete."""
        found: list[MoveRecord] = []
        deadline_s = time.monotonic() + WAIT_S
        while True:
            _require_time(deadline_s, f"move and complete sample {key.sample_index}")
            taken = ask(self._scheduler.take.remote(0.5), "take")
            found += taken.moves
            if any(completion.key == key for completion in taken.completions) and found:
                return found[0]


def _require_time(deadline_s: float, order: str) -> None:
    if time.monotonic() > deadline_s:
        raise WaitTimeout(
            waiter="the benchmark",
            waited_for="the actors",
            order=order,
            waited_s=WAIT_S,
            advice="look at their logs",
        )
