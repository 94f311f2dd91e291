"""Whole decode steps as two recordings: the draft, and its verification with all that follows (CUDA graphs).

    one copy to the device -> replay: catch up, grow, select -> replay: forward, choices, acceptance, dense caches
                           -> one copy to the host, waited for

A step under a fixed budget reads nothing on the host, so it can be recorded as its forwards can (`engine.model.
cuda_graphs`, whose rules of shapes and padding hold here too): what differs from step to step is copied into tensors
that stay where they are. Samples behind the running ones are padding and write into slots that nobody has; a sample's
caches are written whole when it gets one. Everything a recording does again in its warm-ups is a function of committed
tokens alone, so that they change nothing.

A plain step returns the tokens that the next one begins with, so that without a drafter the next is begun before the
host has read this one: lengths, last tokens and the words of the noise go on where they lie. A step that was begun
writes behind committed tokens alone; whatever left meanwhile has run in it for nothing, and where others came it is
forgotten. So everyone else sees samples as if there were no step under way.

What is not recorded runs as it comes: refined budgets, drafters that the host takes part in, tapped targets, the last
tokens before a cache's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..core.decode_records import Budget
from ..core.records import SamplingParams
from .attention.by_length import SplitAttention
from .attention.visibility import count_up
from .decode_step import StepOutput, concluded, decode_step, forward_and_accept
from .decoding.draft_tree import DraftTree, chain, drop_split_nodes, root_only, select_best
from .decoding.noise import row_words_on_device
from .decoding.running_batch import LAST_TOKENS, RunningBatch, SampleCounters, StepInputs
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
    plan: tuple[int, ...]
    "nodes, depth, branching and width of a draft; empty: none is made"
    unit_temperature: bool
    any_greedy: bool
    any_filter: bool


class FixedBatch(RunningBatch):
    """What a decode step reads of a running batch, for one shape, at addresses that stay."""

    def __init__(self, shape: StepShape, batch: RunningBatch, *, length: int, num_words: int) -> None:
        """Of samples of `length` committed tokens, as far as the host knows."""
        count = shape.num_samples
        self.device, self._make_noise = batch.device, batch.noise_source
        self.lengths = np.full(count, length, dtype=np.int64)
        # its width alone is looked at
        self.tokens = np.broadcast_to(np.int64(0), (count, batch.tokens.shape[1]))
        self._count = count
        like = self._filled_up(batch, num_words)
        self._packed = pack(like, pinned=False).to(self.device)
        lengths, last_tokens, words, self._key_words, *rates = unpack(self._packed, like)
        self._fixed_inputs = StepInputs(lengths=lengths, last_tokens=last_tokens, words=words)
        self._fixed_sampling = RowSampling.of_rates(
            rates,
            unit_temperature=shape.unit_temperature,
            any_greedy=shape.any_greedy,
            any_filter=shape.any_filter,
        )
        self._num_words = num_words
        self.chosen = torch.zeros_like(lengths)
        "of a plain step, by each sample"

    def __len__(self) -> int:
        return self._count

    def follow(self, batch: RunningBatch) -> None:
        """Take over what a running batch of at most as many samples holds now: one copy to the device."""
        on_host = pack(self._filled_up(batch, self._num_words), pinned=self.device.type == "cuda")
        self._packed.copy_(on_host, non_blocking=True)

    def go_on(self) -> Tensor:
        """Commit the chosen token of each sample where they lie, as the host is to find out; return the tokens."""
        inputs = self._fixed_inputs
        inputs.lengths.add_(1)
        inputs.last_tokens.copy_(torch.cat([inputs.last_tokens[:, 1:], self.chosen[:, None]], dim=1))
        positions = inputs.lengths[:, None] + count_up(self._num_words, self.device)
        inputs.words.copy_(row_words_on_device(self._key_words, positions))
        return self.chosen

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
            np.pad(batch.words[: len(lengths)], ((0, missing), (0, 0))),
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
    go_on: Run | None
    "of a plain step without a drafter: makes its outcome the next one's inputs"

    def has_next(self, batch: RunningBatch) -> bool:
        """Whether it also serves the step behind that of a batch, and that is not for nothing."""
        fits = batch.lengths[: len(batch)].max() < self.batch.lengths[0]
        return self.go_on is not None and bool(fits) and int(batch.remaining_tokens.max()) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunStep:
    """A step on its way to the host."""

    step: RecordedStep
    samples: list[SampleCounters]
    "of its rows; they tell a sample from itself where it left and came again"
    packed: Tensor
    phases: Phases

    @staticmethod
    def of(
        step: RecordedStep, batch: RunningBatch, clock: Callable[[], float], *, behind: Run | None
    ) -> BegunStep:
        """Replay a step, `behind` what makes its inputs."""
        phases = Phases(clock, batch.device)
        if behind is not None:
            behind()
        phases.mark()
        packed = step.accept().to("cpu", non_blocking=True, copy=True)
        phases.mark(is_last=True)
        return BegunStep(step=step, samples=[*batch.counters], packed=packed, phases=phases)

    def rows_of(self, batch: RunningBatch) -> list[int] | None:
        """The rows of the samples that run now; None: not all of them were there."""
        row_of = {id(one): row for row, one in enumerate(self.samples)}
        rows = [row_of.get(id(one), -1) for one in batch.counters]
        return None if -1 in rows else rows


class StepRecordings(Recordings[StepShape, RecordedStep]):
    """Decode steps of one engine by shape; called in the place of `decode_step`."""

    kind = "steps"
    _next: BegunStep | None = None
    "behind the one that was read last"

    @torch.inference_mode()
    def __call__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        batch: RunningBatch,
        budget: Budget,
        clock: Callable[[], float],
        refinement: Refinement | None = None,
        may_go_on: bool = False,
    ) -> StepOutput:
        """See `engine.decode_step.decode_step`; replayed where that is possible."""
        called_s, recording_s = clock(), 0.0
        begun, self._next = self._next, None
        rows = None if begun is None else begun.rows_of(batch)
        if begun is None or rows is None:
            shape = self._shape(runner, drafter, batch, budget, refinement)
            if shape is None:
                return decode_step(runner, drafter, batch, budget, clock, refinement)
            step = self._recordings.get(shape)
            if step is None:
                step = self._record(shape, runner, drafter, batch, budget)
                recording_s = clock() - called_s
            step.batch.follow(batch)
            begun, rows = BegunStep.of(step, batch, clock, behind=step.draft), [*range(len(batch))]
        step = begun.step
        if may_go_on and len(rows) == len(begun.samples) and step.has_next(batch):
            self._next = BegunStep.of(step, batch, clock, behind=step.go_on)
        seconds = begun.phases.finish(called_s)
        found = [each[rows] for each in _unpacked(begun.packed, step.results)]
        output = concluded(drafter, batch, budget, found, seconds)
        return replace(output, recording_s=recording_s, has_next=self._next is not None)

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
            plan=(budget.num_nodes, budget.depth, budget.branching, budget.width) if drafts else (),
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
        draft, results, tree = None, [], root_only(len(fixed), fixed.device)
        if shape.catch_up and isinstance(drafter, ModelDrafter):
            draft, tree = self._record_draft(shape, drafter, fixed, budget)

        def accept() -> Tensor:
            found, _ = forward_and_accept(
                runner,
                drafter,
                fixed,
                budget,
                fixed.noise(levels, runner.vocab_size),
                drop_split_nodes(tree, fixed.inputs().lengths - 1) if runner.rounds_by_chunk else tree,
                lambda: None,
            )
            results[:] = [(each.dtype, tuple(each.shape)) for each in found]
            if drafter is None:
                fixed.chosen.copy_(found[0][:, 0])
            return torch.cat([each.reshape(-1).view(torch.uint8) for each in found])

        with runner.unrecorded():
            run = self._recorder.record(accept)
        go_on = self._recorder.record(lambda: fixed.go_on()) if drafter is None else None
        step = RecordedStep(batch=fixed, draft=draft, accept=run, results=results, go_on=go_on)
        return self.keep(shape, step)

    def _record_draft(
        self,
        shape: StepShape,
        drafter: ModelDrafter,
        fixed: FixedBatch,
        budget: Budget,
    ) -> tuple[Run, DraftTree]:
        """Record a draft; also the tree, whose tensors hold what the last replay has drafted."""
        grown: list[DraftTree] = []

        def grow() -> Tensor:
            logits = drafter.behind_root(fixed, shape.catch_up)
            noise = fixed.noise(budget.deepest + 1, drafter.runner.vocab_size)
            tree = select_best(drafter.grow(fixed, budget, noise, logits), budget.num_nodes)
            grown[:] = [tree]
            if tree.is_chain:
                return tree.token_ids
            return torch.stack([tree.token_ids, tree.parents, tree.depth, tree.rank, tree.draft_slots])

        with drafter.runner.unrecorded():
            run = self._recorder.record(grow)
        drafted, (tree,) = run(), grown
        if tree.is_chain:
            return run, chain(drafted)
        token_ids, parents, depth, rank, draft_slots = drafted
        # chosen by already
        scores = torch.zeros(token_ids.shape, device=token_ids.device)
        kept = {"parents": parents, "depth": depth, "rank": rank, "draft_slots": draft_slots}
        return run, replace(tree, token_ids=token_ids, scores=scores, **kept)


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
