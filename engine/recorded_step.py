"""Whole decode steps as two recordings: the draft, and its verification with all that follows (CUDA graphs).

    one copy to the device -> replay: catch up, grow, select -> replay: forward, choices, acceptance, dense caches
                           -> one copy to the host, waited for

A step under a fixed budget reads nothing on the host, so it can be recorded as its forwards can (`engine.model.
cuda_graphs`, whose rules of shapes and padding hold here too): what differs from step to step is copied into tensors
that stay where they are. Samples behind the running ones are padding and write into slots that nobody has; a sample's
caches are written whole when it gets one. Everything a recording does again in its warm-ups is a function of committed
tokens alone, so that they change nothing.

What is not recorded runs as it comes: refined budgets, drafters that the host takes part in, tapped targets, the last
tokens before a cache's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.decode_records import Budget
from ..core.records import SamplingParams
from .attention.by_length import SplitAttention
from .decode_step import StepOutput, concluded, decode_step, forward_and_accept
from .decoding.draft_tree import DraftTree, chain, drop_split_nodes, root_only, select_best
from .decoding.noise import Noise
from .decoding.running_batch import LAST_TOKENS, RunningBatch, StepInputs
from .decoding.sampling_rule import RowSampling
from .decoding.step_phases import Phases
from .drafters.drafter import Drafter
from .drafters.model_drafter import ModelDrafter
from .drafters.refinement import Refinement
from .model.cuda_graphs import SAMPLE_COUNTS, VIEW_LENGTHS, Recordings, Run, at_least
from .model.runner import ModelRunner
from .upload import pack, unpack

CATCH_UPS = (2, LAST_TOKENS)
"Committed tokens that the drafter runs of each sample: rounded up, a recording for each."
_GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What a recording of a step is for."""

    num_samples: int
    reach_tokens: int
    "of the longest sample, with whatever the step writes behind it; the cache's where attention goes by lengths"
    catch_up: int
    nodes: int
    depth: int
    branching: int
    width: int
    unit_temperature: bool
    any_greedy: bool
    any_filter: bool


class FixedBatch(RunningBatch):
    """What a decode step reads of a running batch, for one shape, at addresses that stay."""

    def __init__(self, shape: StepShape, batch: RunningBatch, *, length: int, num_words: int) -> None:
        """Of samples of `length` committed tokens, as far as the host knows."""
        count = shape.num_samples
        self.device = batch.device
        self.lengths = np.full(count, length, dtype=np.int64)
        # its width alone is looked at
        self.tokens = np.broadcast_to(np.int64(0), (count, batch.tokens.shape[1]))
        self._count = count
        like = self._filled_up(batch, num_words)
        self._packed = pack(like, pinned=False).to(self.device)
        on_device = unpack(self._packed, like)
        self._fixed_inputs = StepInputs(lengths=on_device[0], last_tokens=on_device[1], words=on_device[2])
        self._fixed_sampling = RowSampling.of_rates(
            on_device[3:],
            unit_temperature=shape.unit_temperature,
            any_greedy=shape.any_greedy,
            any_filter=shape.any_filter,
        )
        self._num_words = num_words

    def __len__(self) -> int:
        return self._count

    def follow(self, batch: RunningBatch) -> None:
        """Take over what a running batch of at most as many samples holds now: one copy to the device."""
        on_host = pack(self._filled_up(batch, self._num_words), pinned=self.device.type == "cuda")
        self._packed.copy_(on_host, non_blocking=True)

    def inputs(self, num_words: int = 0) -> StepInputs:
        """See `RunningBatch.inputs`."""
        return self._fixed_inputs

    @property
    def sampling(self) -> RowSampling:
        """See `RunningBatch.sampling`."""
        return self._fixed_sampling

    def _filled_up(self, batch: RunningBatch, num_words: int) -> list[np.ndarray]:
        """A running batch's arrays, with rows for padding samples: greedy, token 0, as short as they may be."""
        lengths, last_tokens, words = batch.host_inputs(num_words)
        missing = self._count - len(lengths)
        samplings = [request.sampling for request in batch.requests] + [_GREEDY] * missing
        return [
            np.pad(lengths, (0, missing), constant_values=LAST_TOKENS),
            np.pad(last_tokens, ((0, missing), (0, 0))),
            np.pad(words, ((0, 0), (0, missing), (0, 0))),
            *RowSampling.host_rates(samplings),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One shape's inputs, replays and results."""

    batch: FixedBatch
    draft: Run | None
    accept: Run
    results: list[tuple[torch.dtype, tuple[int, ...]]]
    "of the tensors that `accept` returns behind one another"


class StepRecordings(Recordings[StepShape, RecordedStep]):
    """Decode steps of one engine by shape; called in the place of `decode_step`."""

    kind = "steps"

    @torch.inference_mode()
    def __call__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        batch: RunningBatch,
        budget: Budget,
        clock: Callable[[], float],
        refinement: Refinement | None = None,
    ) -> StepOutput:
        """See `engine.decode_step.decode_step`; replayed where that is possible."""
        shape = self._shape(runner, drafter, batch, budget, refinement)
        if shape is None:
            return decode_step(runner, drafter, batch, budget, clock, refinement)
        recording, recording_s = self._recordings.get(shape), 0.0
        if recording is None:
            began_s = clock()
            recording = self._record(shape, runner, drafter, batch, budget)
            recording_s = clock() - began_s
        phases = Phases(clock, runner.device)
        recording.batch.follow(batch)
        if recording.draft is not None:
            recording.draft()
        phases.mark()
        packed = recording.accept().to("cpu", non_blocking=True)
        phases.mark()
        # behind one another on the host too; there once `concluded` has waited
        found = [rows[: len(batch)] for rows in _unpacked(packed, recording.results)]
        return concluded(drafter, batch, budget, found, phases, recording_s=recording_s)

    def _shape(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        batch: RunningBatch,
        budget: Budget,
        refinement: Refinement | None,
    ) -> StepShape | None:
        """The recording that serves this step; None where none can, or no room is left to make it."""
        drafts = not budget.is_plain and drafter is not None
        if refinement is not None or runner.taps is not None or batch.noise_source.ahead:
            return None
        runners, catch_up, longest = [runner], 0, int(batch.lengths[: len(batch)].max())
        if drafts:
            if not isinstance(drafter, ModelDrafter) or drafter.fused_chain is not None:
                return None
            catch_up = next((few for few in CATCH_UPS if few >= drafter.catch_up(batch)), 0)
            if not 0 < catch_up <= int(batch.lengths[: len(batch)].min()):
                return None
            runners.append(drafter.runner)
        capacity = min(one.pool.capacity for one in runners)
        by_length = all(isinstance(one.attention, SplitAttention) for one in runners)
        reach = longest + _columns(budget)
        if reach > capacity:
            return None
        shape = StepShape(
            num_samples=min(at_least(len(batch), SAMPLE_COUNTS), runner.pool.num_slots),
            reach_tokens=capacity if by_length else min(at_least(reach, VIEW_LENGTHS), capacity),
            catch_up=catch_up,
            nodes=budget.num_nodes if drafts else 0,
            depth=budget.depth if drafts else 0,
            branching=budget.branching if drafts else 0,
            width=budget.width if drafts else 0,
            unit_temperature=batch.sampling.unit_temperature,
            any_greedy=batch.sampling.any_greedy,
            any_filter=batch.sampling.any_filter,
        )
        return None if self.is_full and shape not in self._recordings else shape

    def _record(
        self,
        shape: StepShape,
        runner: ModelRunner,
        drafter: Drafter | None,
        batch: RunningBatch,
        budget: Budget,
    ) -> RecordedStep:
        levels = budget.deepest + 1
        fixed = FixedBatch(shape, batch, length=shape.reach_tokens - _columns(budget), num_words=levels)
        fixed.follow(batch)

        def noise() -> Noise:
            return batch.noise_source.of_words(fixed.inputs().words, runner.vocab_size)

        draft, results, tree = None, [], root_only(len(fixed), fixed.device)
        if shape.catch_up and isinstance(drafter, ModelDrafter):
            draft, tree = self._record_draft(shape, drafter, fixed, budget, noise)

        def accept() -> Tensor:
            found = forward_and_accept(
                runner,
                drafter,
                fixed,
                budget,
                noise(),
                drop_split_nodes(tree, fixed.inputs().lengths - 1) if runner.rounds_by_chunk else tree,
                lambda: None,
            )
            results[:] = [(each.dtype, tuple(each.shape)) for each in found.tensors]
            return torch.cat([each.reshape(-1).view(torch.uint8) for each in found.tensors])

        with runner.unrecorded():
            run = self._recorder.record(accept)
        return self.keep(shape, RecordedStep(batch=fixed, draft=draft, accept=run, results=results))

    def _record_draft(
        self,
        shape: StepShape,
        drafter: ModelDrafter,
        fixed: FixedBatch,
        budget: Budget,
        noise: Callable[[], Noise],
    ) -> tuple[Run, DraftTree]:
        """Record a draft; also the tree, whose tensors hold what the last replay has drafted."""
        is_chain = by_kernels = False

        def grow() -> Tensor:
            nonlocal is_chain, by_kernels
            logits = drafter.behind_root(fixed, shape.catch_up)
            tree = select_best(drafter.grow(fixed, budget, noise(), logits), budget.num_nodes)
            is_chain, by_kernels = tree.is_chain, tree.by_kernels
            if is_chain:
                return tree.token_ids
            return torch.stack([tree.token_ids, tree.parents, tree.depth, tree.rank, tree.draft_slots])

        with drafter.runner.unrecorded():
            run = self._recorder.record(grow)
        drafted = run()
        if is_chain:
            return run, chain(drafted)
        token_ids, parents, depth, rank, draft_slots = drafted
        return run, DraftTree(
            token_ids=token_ids,
            parents=parents,
            depth=depth,
            rank=rank,
            # chosen by already
            scores=torch.zeros(token_ids.shape, device=token_ids.device),
            draft_slots=draft_slots,
            is_chain=False,
            by_kernels=by_kernels,
        )


def _columns(budget: Budget) -> int:
    """Tokens behind the committed ones that a step writes into a cache, at most: nodes, or the draft's own."""
    if budget.is_plain:
        return 0
    columns = level = 0
    for _ in range(budget.depth - 1):
        level = min(budget.width, max(level, 1) * budget.branching)
        columns += level
    return max(budget.num_nodes, columns)


def _unpacked(packed: Tensor, results: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
    """The arrays whose bytes lie behind one another."""
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in results]
    parts = zip(packed.split(sizes), results, strict=True)
    return [part.view(dtype).view(shape).numpy() for part, (dtype, shape) in parts]
