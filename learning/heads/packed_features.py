"""Sequences as a head's unrolled training takes them: cells, the anchors that draft, and what each level reads.

Cell i of a sequence joins the target's hidden states at position i with token i + 1 and predicts token i + 2. An anchor
is a cell that the engine drafts from: those whose token i + 2 is the response's. From anchor i, level k reads token
i + k and predicts token i + k + 1, of which the target's distribution is that of position i + k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.drafters.head.feature_sequence import FeatureSequence


def first_anchor(sequence: FeatureSequence) -> int:
    """The cell that predicts the response's first token; of a prompt of one token, its second."""
    return max(sequence.prompt_length - 2, 0)


def num_anchors(sequence: FeatureSequence) -> int:
    """Cells of a sequence that are drafted from; 0 where it is too short."""
    return max(len(sequence.token_ids) - 2 - first_anchor(sequence), 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a sequence lies: its cells among all cells, its anchors among all anchors."""

    cells: slice
    anchors: slice
    first_anchor: int

    @property
    def num_cells(self) -> int:
        """Cells whose keys and values are seen."""
        return self.cells.stop - self.cells.start

    @property
    def num_anchors(self) -> int:
        """Of the first level; each further level has one fewer."""
        return self.anchors.stop - self.anchors.start


class PackedFeatures:
    """Several sequences one after another, without padding, on one device. Those without an anchor are left out."""

    def __init__(self, sequences: Sequence[FeatureSequence], device: torch.device | None = None) -> None:
        self._sequences = [sequence for sequence in sequences if num_anchors(sequence)]
        self._device = device or torch.device("cpu")
        self.spans: list[Span] = []
        cell = anchor = 0
        for sequence in self._sequences:
            ends = cell + len(sequence.token_ids) - 2, anchor + num_anchors(sequence)
            self.spans.append(Span(slice(cell, ends[0]), slice(anchor, ends[1]), first_anchor(sequence)))
            cell, anchor = ends
        self.num_cells, self.num_anchors = cell, anchor

    @cached_property
    def taps(self) -> Float[Tensor, "N taps"]:
        """Hidden states of every cell."""
        return self._joined([sequence.taps[:-1] for sequence in self._sequences]).float()

    @cached_property
    def positions(self) -> Int[Tensor, " N"]:
        """Of every cell."""
        return self._joined([torch.arange(span.num_cells) for span in self.spans])

    @cached_property
    def cell_tokens(self) -> Int[Tensor, " N"]:
        """The token that every cell reads."""
        return self._joined([torch.from_numpy(each.token_ids[1:-1]) for each in self._sequences])

    @cached_property
    def anchor_cells(self) -> Int[Tensor, " M"]:
        """The cell of every anchor."""
        return self._joined(
            [torch.arange(span.cells.start + span.first_anchor, span.cells.stop) for span in self.spans]
        )

    @cached_property
    def last(self) -> Float[Tensor, "M H"]:
        """The target's last hidden states that predict each anchor's first drafted token."""
        return self._joined([each.last[-num_anchors(each) :] for each in self._sequences]).float()

    def level_anchors(self, level: int) -> Int[Tensor, " R"]:
        """Anchors, ascending, that have a token to predict at a level, counted from 1."""
        counts = zip(self.spans, self.level_counts(level), strict=True)
        return self._joined([torch.arange(count) + span.anchors.start for span, count in counts])

    def level_counts(self, level: int) -> list[int]:
        """How many of those each sequence has."""
        return [max(span.num_anchors - level + 1, 0) for span in self.spans]

    def level_tokens(self, level: int) -> Int[Tensor, " R"]:
        """The token that each of them reads at the level."""
        return self.cell_tokens[self._level_cells(level)]

    def level_positions(self, level: int) -> Int[Tensor, " R"]:
        """Their positions at the level."""
        return self.positions[self._level_cells(level)]

    def level_targets(self, level: int) -> Int[Tensor, " R"]:
        """The tokens that the target sampled where they predict."""
        after = self._joined([torch.from_numpy(each.token_ids[2:]) for each in self._sequences])
        return after[self._level_cells(level)]

    def _level_cells(self, level: int) -> Int[Tensor, " R"]:
        return self.anchor_cells[self.level_anchors(level)] + level - 1

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
