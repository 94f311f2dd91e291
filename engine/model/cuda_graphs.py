"""Replays whole decode forwards instead of launching their kernels one by one (CUDA graphs).

On a GPU a small batch's forward takes longer to launch than to run. A recording repeats the same kernels on the same
addresses, so
- what differs from step to step (token ids, positions, where keys are written, what is seen) is copied into tensors
  that stay where they are;
- shapes are rounded up to few, each made when first needed: samples to SAMPLE_COUNTS, views to VIEW_LENGTHS; where
  attention goes by lengths (`engine.attention.by_length`) the one view is the whole cache;
- samples that are only padding write to the last position of their own slot, which no running sample has reached.
Prefills, ragged forwards and, once the memory budget is spent, new shapes run as they come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..cache.kv_memory import round_up
from .forward_plan import TreePlan

logger = logging.getLogger(__name__)

SAMPLE_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"Beyond, multiples of the last."
VIEW_LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048)
"Beyond, multiples of the last."
WARM_UPS = 2
"Runs before a recording: libraries choose kernels and take their workspaces in the first ones."

Run = Callable[[], Tensor]
Shape = TypeVar("Shape", bound=Any)
Recorded = TypeVar("Recorded")
DecodeForward = Callable[[Tensor, Tensor, TreePlan], Tensor]


@runtime_checkable
class Recorder(Protocol):
    """Records what a function does on the device."""

    held_bytes: int
    "device memory that the recordings hold"

    def record(self, run: Run) -> Run:
        """Return a function that repeats the kernels of `run` and returns the same tensor each time."""
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held_bytes = 0
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Run:
        """See `Recorder.record`; `run` is warmed up on another stream first."""
        aside = _aside(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        # a capture begins by giving cached blocks back: counted after it, the difference could be negative
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # other threads may copy leased caches meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        # the static result is held, whatever other threads gave back meanwhile
        self.held_bytes += max(torch.cuda.memory_reserved(self._device) - before, result.nbytes)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@cache
def _aside(device: torch.device) -> Any:
    """Where recordings are warmed up: one for all, since libraries keep a workspace for every stream for good."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What a recording is for."""

    num_samples: int
    num_tokens: int
    "of each sample"
    view_tokens: int
    columns: int = 0
    "of a tree's marks, where attention goes by lengths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One shape's inputs, at fixed addresses, and its replay."""

    input_ids: Tensor
    position_ids: Tensor
    plan: TreePlan
    replay: Run


class Recordings(Generic[Shape, Recorded]):
    """What was recorded of one kind, by shape."""

    kind = ""

    def __init__(self, recorder: Recorder, *, max_bytes: int) -> None:
        """Hold no more than about `max_bytes` of recordings: the one that crosses the line is the last."""
        self._recorder = recorder
        self._max_bytes = max_bytes
        self._recordings: dict[Shape, Recorded] = {}

    @property
    def shapes(self) -> list[Shape]:
        """Shapes recorded so far."""
        return sorted(self._recordings)

    @property
    def is_full(self) -> bool:
        """Whether nothing more is recorded."""
        return self._recorder.held_bytes >= self._max_bytes

    def close(self) -> None:
        """Record nothing more."""
        self._max_bytes = 0

    def keep(self, shape: Shape, recording: Recorded) -> Recorded:
        """Keep what was recorded, and say so where it is the last."""
        self._recordings[shape] = recording
        if self.is_full:
            logger.warning(
                "recorded %s hold %.0f MB of at most %.0f MB after %d shapes: further shapes run unrecorded; "
                "raise engine.graph_memory_mb to record them",
                self.kind,
                self._recorder.held_bytes / 1e6,
                self._max_bytes / 1e6,
                len(self._recordings),
            )
        return recording


class ForwardGraphs(Recordings[StepShape, Recording]):
    """Decode forwards of one model by shape."""

    kind = "forwards"

    def run(self, forward: DecodeForward, input_ids: Tensor, position_ids: Tensor, plan: TreePlan) -> Tensor:
        """Return what `forward` returns for the packed tokens, replayed where that is possible.

        `input_ids` may be longer than the plan's tokens: what a forward wants as padding.
        """
        if plan.ragged is not None:
            return forward(input_ids, position_ids, plan)
        shape = shape_of(plan)
        plan.view_tokens = shape.view_tokens
        recording = self._recordings.get(shape)
        if recording is None:
            result = forward(input_ids, position_ids, plan)
            if not self.is_full:
                self._record(forward, shape, input_ids, position_ids, plan)
            return result
        _copy_inputs(recording.input_ids, recording.position_ids, input_ids, position_ids)
        recording.plan.follow(plan)
        # the next replay writes over the result
        return recording.replay()[: len(input_ids)].clone()

    def _record(
        self,
        forward: DecodeForward,
        shape: StepShape,
        input_ids: Tensor,
        position_ids: Tensor,
        plan: TreePlan,
    ) -> None:
        tokens = max(shape.num_samples * shape.num_tokens, len(input_ids))
        ids, positions = input_ids.new_zeros(tokens), position_ids.new_zeros(tokens)
        _copy_inputs(ids, positions, input_ids, position_ids)
        fixed = plan.fixed_copy(shape.num_samples)
        replay = self._recorder.record(lambda: forward(ids, positions, fixed))
        self.keep(shape, Recording(input_ids=ids, position_ids=positions, plan=fixed, replay=replay))


def shape_of(plan: TreePlan) -> StepShape:
    """Return the recorded shape that serves a plan; the pool bounds samples and view."""
    pool = plan.pool
    return StepShape(
        num_samples=min(at_least(plan.base.shape[0], SAMPLE_COUNTS), pool.num_slots),
        num_tokens=plan.num_tokens,
        view_tokens=min(at_least(plan.view_tokens, VIEW_LENGTHS), pool.capacity),
        columns=plan.marked_columns,
    )


def at_least(count: int, steps: tuple[int, ...]) -> int:
    """Return the first of the steps, or multiple of the last, that is no less than `count`."""
    return next((step for step in steps if step >= count), round_up(count, steps[-1]))


def _copy_inputs(ids: Tensor, positions: Tensor, new_ids: Tensor, new_positions: Tensor) -> None:
    """Tokens behind the new ones stay what they were: any valid ids will do."""
    ids[: len(new_ids)].copy_(new_ids)
    positions[: len(new_positions)].copy_(new_positions)
