"""Feature sequences: as a head's unrolled training takes them, and the buffer in which they wait to be learned from.

Cell i of a sequence joins the target's hidden states at position i with token i + 1 and predicts token i + 2. An anchor
is a cell that the engine drafts from: those whose token i + 2 is the response's. From anchor i, level k reads token
i + k and predicts token i + k + 1, of which the target's distribution is that of position i + k.

Anchors do not see each other, so a long sequence may be learned from in stretches, each with the cells of its past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import ConfigError
from ...engine.drafters.head.feature_recorder import FeatureRecorder, FeatureSequence
from ...engine.drafters.head.tapping import tap_for_head
from ...engine.engine import Engine


def first_anchor(sequence: FeatureSequence) -> int:
    """The cell that predicts the response's first token; of a prompt of one token, its second."""
    return max(sequence.prompt_length - 2, 0)


def num_anchors(sequence: FeatureSequence) -> int:
    """Cells of a sequence that are drafted from; 0 where it is too short."""
    return max(len(sequence.token_ids) - 2 - first_anchor(sequence), 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a sequence, or a stretch of one, lies: its cells among all cells, its anchors among all anchors."""

    cells: slice
    anchors: slice
    first_anchor: int
    "its cell, counted from the sequence's first"
    num_further: int
    "anchors of the sequence that come behind these"

    @property
    def num_cells(self) -> int:
        """Cells whose keys and values are seen: up to the last anchor's own."""
        return self.cells.stop - self.cells.start

    @property
    def num_anchors(self) -> int:
        """Of the first level."""
        return self.anchors.stop - self.anchors.start

    def level_count(self, level: int) -> int:
        """Anchors with a token to predict at a level, counted from 1: each level of a whole sequence has one fewer."""
        return max(min(self.num_anchors, self.num_anchors + self.num_further - level + 1), 0)

    def num_targets(self, num_levels: int) -> int:
        """Positions that any level predicts."""
        return self.num_anchors + min(self.num_further, num_levels - 1)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some neighbouring anchors of one of several sequences."""

    index: int
    "of the sequence"
    anchors: range
    "counted from its first anchor"


class PackedFeatures:
    """Several sequences one after another, without padding, on one device. Those without an anchor are left out."""

    def __init__(
        self,
        sequences: Sequence[FeatureSequence],
        device: torch.device | None = None,
        *,
        stretches: Sequence[Stretch] | None = None,
    ) -> None:
        """Pack all anchors, or those of `stretches` alone: of the cells before these, only what attention sees."""
        if stretches is None:
            stretches = [Stretch(index, range(num_anchors(each))) for index, each in enumerate(sequences)]
        stretches = [each for each in stretches if len(each.anchors)]
        self._sequences = [sequences[each.index] for each in stretches]
        self._device = device or torch.device("cpu")
        self.spans: list[Span] = []
        cell = anchor = 0
        for sequence, stretch in zip(self._sequences, stretches, strict=True):
            first, past = stretch.anchors.start, first_anchor(sequence)
            ends = cell + past + stretch.anchors.stop, anchor + len(stretch.anchors)
            further = num_anchors(sequence) - stretch.anchors.stop
            self.spans.append(Span(slice(cell, ends[0]), slice(anchor, ends[1]), past + first, further))
            cell, anchor = ends
        self.num_cells, self.num_anchors = cell, anchor

    @cached_property
    def taps(self) -> Float[Tensor, "N taps"]:
        """Hidden states of every cell."""
        return self._joined([each.taps[: span.num_cells] for each, span in self._each()]).float()

    @cached_property
    def positions(self) -> Int[Tensor, " N"]:
        """Of every cell."""
        return self._joined([torch.arange(span.num_cells) for span in self.spans])

    @cached_property
    def cell_tokens(self) -> Int[Tensor, " N"]:
        """The token that every cell reads."""
        return self._joined(
            [torch.from_numpy(each.token_ids[1 : span.num_cells + 1]) for each, span in self._each()]
        )

    @cached_property
    def anchor_cells(self) -> Int[Tensor, " M"]:
        """The cell of every anchor."""
        return self._joined(
            [torch.arange(span.cells.start + span.first_anchor, span.cells.stop) for span in self.spans]
        )

    def target_states(self, num_levels: int) -> Float[Tensor, "P H"]:
        """The target's last hidden states at every position that one of the levels predicts from."""
        parts = []
        for each, span in self._each():
            # the row of an anchor predicts the first token that is drafted from it
            first = span.first_anchor + 1 - each.first
            parts.append(each.last[first : first + span.num_targets(num_levels)])
        return self._joined(parts).float()

    def level_rows(self, level: int, num_levels: int) -> Int[Tensor, " R"]:
        """Of `target_states(num_levels)` the rows, ascending, that a level's predictions are compared with."""
        parts, start = [], 0
        for span in self.spans:
            parts.append(torch.arange(span.level_count(level)) + start + level - 1)
            start += span.num_targets(num_levels)
        return self._joined(parts)

    def level_counts(self, level: int) -> list[int]:
        """How many anchors of each span have a token to predict at a level, counted from 1: its first ones."""
        return [span.level_count(level) for span in self.spans]

    def level_tokens(self, level: int) -> Int[Tensor, " R"]:
        """The token that each of them reads at the level."""
        return self._tokens(level, 1)

    def level_positions(self, level: int) -> Int[Tensor, " R"]:
        """Their positions at the level."""
        return self._joined(
            [torch.arange(span.level_count(level)) + span.first_anchor + level - 1 for span in self.spans]
        )

    def level_targets(self, level: int) -> Int[Tensor, " R"]:
        """The tokens that the target sampled where they predict."""
        return self._tokens(level, 2)

    def _tokens(self, level: int, ahead: int) -> Int[Tensor, " R"]:
        parts = []
        for each, span in self._each():
            first = span.first_anchor + level - 1 + ahead
            parts.append(torch.from_numpy(each.token_ids[first : first + span.level_count(level)]))
        return self._joined(parts)

    def _each(self) -> Iterator[tuple[FeatureSequence, Span]]:
        return zip(self._sequences, self.spans, strict=True)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(self._device)


def pack_sequences(sequences: Sequence[FeatureSequence], max_anchors: int) -> list[list[int]]:
    """Split indices of sequences into packs of at most `max_anchors` anchors, in their order; a longer one is alone."""
    packs: list[list[int]] = []
    room = 0
    for index in np.arange(len(sequences)).tolist():
        size = num_anchors(sequences[index])
        if not packs or size > room:
            packs.append([])
            room = max_anchors
        packs[-1].append(index)
        room -= size
    return packs


def pack_stretches(sequences: Sequence[FeatureSequence], max_anchors: int) -> list[list[Stretch]]:
    """Split all anchors into packs of at most `max_anchors`, in their order; one too long is cut evenly."""
    packs: list[list[Stretch]] = []
    room = 0
    for index, sequence in enumerate(sequences):
        total = num_anchors(sequence)
        num_parts = -(-total // max_anchors)
        ends = [total * part // num_parts for part in range(num_parts + 1)] if total else []
        for start, stop in pairwise(ends):
            if stop - start > room:
                packs.append([])
                room = max_anchors
            packs[-1].append(Stretch(index, range(start, stop)))
            room -= stop - start
    return packs


LEAST_NEED = 0.02
"A sequence that a head has learned is drawn again now and then: what is learned may be lost."


@dataclass(slots=True, eq=False)
class _Kept:
    sequence: FeatureSequence
    iteration: int
    need: float = 1.0
    num_visits: int = 0
    "times drawn"
    num_passes: int = 0
    "times learned from"


class FeatureBuffer:
    """Holds sequences of the iteration in progress, and of the one before it those that there is room for.

    Responses finish in the order of their lengths: early in an iteration only short ones are there. So of the previous
    iteration's the longest stay longest.
    Source: Hu et al. 2025, 'TLT' (arXiv 2511.16665), section 4.2 (online data buffer, one-step offset).
    """

    def __init__(self, max_bytes: int, *, max_passes: int = 1 << 62) -> None:
        """A sequence that was learned from `max_passes` times is drawn no more.

        Raises ConfigError unless `max_bytes` is above 0.
        """
        if max_bytes <= 0:
            raise ConfigError(
                f"the buffer of a draft head's features expects max_bytes above 0, got {max_bytes}"
            )
        self.max_bytes = max_bytes
        self._max_passes = max_passes
        self.num_bytes = 0
        self._kept: list[_Kept] = []
        self._iteration = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, sequence: FeatureSequence) -> bool:
        """Keep a sequence; returns False where it alone is larger than the buffer, or has nothing to learn.

        Room is made by leaving out, first, the previous iteration's shortest, then those of this one that were visited
        most and are needed least.
        """
        if not num_anchors(sequence) or sequence.num_bytes > self.max_bytes:
            return False
        while self.num_bytes + sequence.num_bytes > self.max_bytes:
            self._leave_out(min(self._kept, key=self._worth))
        self._kept.append(_Kept(sequence, self._iteration))
        self.num_bytes += sequence.num_bytes
        return True

    def next_iteration(self) -> None:
        """A new iteration begins: what is older than the one that ends is left out."""
        for each in [each for each in self._kept if each.iteration < self._iteration]:
            self._leave_out(each)
        self._iteration += 1

    def sample(self, rng: np.random.Generator, max_tokens: int) -> list[FeatureSequence]:
        """Draw different sequences of at most `max_tokens` response tokens in all, but at least one if any may be.

        A sequence's chance grows with its positions that the head is expected to fail on: those that no step has
        learned from count as failed. They are given with the longest first.
        """
        kept = [each for each in self._kept if each.num_passes < self._max_passes]
        if not kept:
            return []
        weights = np.array([max(each.need, LEAST_NEED) * num_anchors(each.sequence) for each in kept])
        # exponential clocks: an order drawn without putting back (Efraimidis and Spirakis 2006)
        order = np.argsort(rng.exponential(size=len(weights)) / weights)
        chosen: list[_Kept] = []
        room = max_tokens
        for place in order.tolist():
            size = kept[place].sequence.num_response_tokens
            if size <= room or not chosen:
                chosen.append(kept[place])
                room -= size
            if room <= 0:
                break
        for each in chosen:
            each.num_visits += 1
        return sorted((each.sequence for each in chosen), key=lambda one: -one.num_response_tokens)

    def learned(self, sequences: Sequence[FeatureSequence], needs: Sequence[float]) -> None:
        """Take what a step found: the share of each sequence's positions that the head is expected to fail on."""
        by_id = {id(sequence): need for sequence, need in zip(sequences, needs, strict=True)}
        for each in self._kept:
            if id(each.sequence) in by_id:
                each.need = by_id[id(each.sequence)]
                each.num_passes += 1

    def drop(self, sequences: Sequence[FeatureSequence]) -> None:
        """Leave these out: nothing can be learned from them."""
        ids = {id(sequence) for sequence in sequences}
        for each in [each for each in self._kept if id(each.sequence) in ids]:
            self._leave_out(each)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.num_bytes = 0

    def _worth(self, each: _Kept) -> tuple[int, int, float]:
        length = each.sequence.num_response_tokens
        if each.iteration < self._iteration:
            return each.iteration, length, 0.0
        return each.iteration, -each.num_visits, each.need * length

    def _leave_out(self, each: _Kept) -> None:
        self._kept.remove(each)
        self.num_bytes -= each.sequence.num_bytes


def record_features(
    engine: Engine, tapped_layers: Sequence[int], *, max_bytes: int, dtype: torch.dtype = torch.bfloat16
) -> FeatureRecorder:
    """Record what the engine's samples give a head of these taps to learn from, from now on.

    `max_bytes` and `dtype` as of `FeatureRecorder`; raises ModelError as `tap_for_head`.
    """
    taps = tap_for_head(
        engine.runner,
        tapped_layers,
        max_prefill_tokens=engine.max_prefill_tokens,
        max_total_tokens=engine.max_total_tokens,
    )
    recorder = FeatureRecorder(
        num_taps=len(tapped_layers),
        hidden_size=int(engine.runner.model.config.get_text_config().hidden_size),
        max_bytes=max_bytes,
        dtype=dtype,
    )
    taps.followers.append(recorder)
    return recorder
