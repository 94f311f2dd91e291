"""Keeps what running samples give a head to learn from: no forward is made for it (TLT, arXiv 2511.16665, 4.2).

Rows come from prefills and verifications as they happen. Recorded are samples whose every response token was decoded
here, in one go: not those that moved, were preempted, or went on from an earlier turn's caches. A prefill ends before
the last layer's output, so response tokens that were prefilled again could teach nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...decoding.running_batch import RunningBatch
from ...model.prefill_plan import PrefillPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSequence:
    """Prompt and response of T tokens, at least two; H is the target's hidden size.

    The target's distribution at position j (of token j + 1) is `softmax(lm_head(norm(last[j - first])) / T)`.
    """

    token_ids: np.ndarray
    "int64 [T]"
    prompt_length: int
    taps: Tensor
    "[T - 1, 3 H], bfloat16 or float32: inputs of the tapped layers, side by side, at positions 0 to T - 2"
    last: Tensor
    "[T - 1 - first, H]: output of the target's last layer before its final norm, at positions first to T - 2"

    def __post_init__(self) -> None:
        total, hidden = len(self.token_ids), self.last.shape[-1]
        if not 1 <= self.prompt_length < total:
            raise ValueError(
                f"a prompt of {self.prompt_length} tokens was expected to leave a response in {total} tokens"
            )
        if tuple(self.taps.shape) != (total - 1, 3 * hidden):
            raise ValueError(f"taps expected to be [{total - 1}, {3 * hidden}], got {list(self.taps.shape)}")
        if len(self.last) != total - 1 - self.first:
            raise ValueError(f"last expected to have {total - 1 - self.first} rows, got {len(self.last)}")

    @property
    def first(self) -> int:
        """Position of the first row of `last`: it predicts the response's first token. Prompts need none."""
        return self.prompt_length - 1

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the target sampled."""
        return len(self.token_ids) - self.prompt_length

    @property
    def num_bytes(self) -> int:
        """Memory that tokens and hidden states take."""
        return self.token_ids.nbytes + self.taps.nbytes + self.last.nbytes


LEAST_RESPONSE = 4
"Tokens; of shorter responses there is next to nothing to learn."
FIRST_ROWS = 64


class FeatureRecorder:
    """A `HiddenFollower` that gathers whole sequences. `take` hands them out."""

    def __init__(
        self, *, num_taps: int, hidden_size: int, max_bytes: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Record nothing yet.

        Args:
            num_taps: tapped layers whose inputs a row begins with; the last layer's output follows them.
            hidden_size: H.
            max_bytes: of finished sequences; the oldest are given up for new ones. As much again, at most, for those
                that run: one that outgrows it is recorded no further.
            dtype: of the rows kept.
        """
        self._columns = (num_taps + 1) * hidden_size
        self._hidden_size = hidden_size
        self._max_bytes = max_bytes
        self._dtype = dtype
        self._rows: dict[int, Tensor] = {}
        "of the slots that are recorded, [room, (k + 1) H]; a room of twice what is needed at most"
        self._count: dict[int, int] = {}
        self._decoded_from: dict[int, int] = {}
        "the first position of a slot that a decode step has computed"
        self._done: list[FeatureSequence] = []

    def take(self) -> list[FeatureSequence]:
        """Hand the finished sequences out, the oldest first."""
        done, self._done = self._done, []
        return done

    @property
    def num_bytes(self) -> int:
        """Of finished sequences and of those that run."""
        return self._open_bytes + sum(each.num_bytes for each in self._done)

    def filled(self, tokens: np.ndarray, pieces: Sequence[PrefillPiece], hidden: Tensor) -> None:
        """See `HiddenFollower`."""
        first = 0
        for piece in pieces:
            if piece.start == 0:
                self._begin(piece.slot)
            if self._count.get(piece.slot) == piece.start:
                self._append(piece.slot, hidden[first : first + piece.length])
            else:
                self._forget(piece.slot)
            first += piece.length

    def copied(self, source: int, piece: PrefillPiece) -> None:
        """See `HiddenFollower`."""
        if self._count.get(source, 0) >= piece.length:
            self._begin(piece.slot)
            if piece.slot in self._rows and source in self._rows:
                self._append(piece.slot, self._rows[source][: piece.length])
        else:
            self._forget(piece.slot)

    def verified(
        self, batch: RunningBatch, hidden: Tensor, token_ids: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        """See `HiddenFollower`."""
        for slot in range(len(batch)):
            root = int(batch.lengths[slot]) - 1
            if root == 0:
                self._begin(slot)
            if self._count.get(slot) == root:
                self._decoded_from.setdefault(slot, root)
                self._append(slot, hidden[slot, : int(num_accepted[slot]) + 1])
            else:
                self._forget(slot)

    def moved(self, source: int, target: int) -> None:
        """See `HiddenFollower`."""
        self._forget(target)
        if source in self._rows:
            self._rows[target], self._count[target] = self._rows.pop(source), self._count.pop(source)
            if source in self._decoded_from:
                self._decoded_from[target] = self._decoded_from.pop(source)

    def left(self, slot: int, batch: RunningBatch) -> None:
        """Keep the sequence, if it has ended and all of it was seen; see `HiddenFollower`."""
        prompt, total = int(batch.prompt_lengths[slot]), int(batch.lengths[slot])
        if (history := batch.requests[slot].history) is not None:
            # what this turn began with was given, or sampled from other weights
            prompt += len(history.token_ids)
        rows, count = self._rows.get(slot), self._count.get(slot, 0)
        whole = batch.has_ended(slot) and self._decoded_from.get(slot, total) <= prompt - 1
        self._forget(slot)
        # a stop token or a limit may have cut what a step accepted
        if rows is None or not whole or count < total - 1 or total - prompt < LEAST_RESPONSE:
            return
        taps, last = rows[: total - 1].split([self._columns - self._hidden_size, self._hidden_size], dim=-1)
        self._done.append(
            FeatureSequence(
                token_ids=batch.tokens[slot, :total].copy(),
                prompt_length=prompt,
                taps=taps.contiguous(),
                last=last[prompt - 1 :].contiguous(),
            )
        )
        while self._done and sum(each.num_bytes for each in self._done) > self._max_bytes:
            self._done.pop(0)

    @property
    def _open_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    def _begin(self, slot: int) -> None:
        self._forget(slot)
        if self._open_bytes + FIRST_ROWS * self._columns * self._dtype.itemsize <= self._max_bytes:
            self._rows[slot] = torch.empty(FIRST_ROWS, self._columns, dtype=self._dtype)
            self._count[slot] = 0

    def _append(self, slot: int, hidden: Tensor) -> None:
        count = self._count[slot]
        needed = count + len(hidden)
        if needed > len(self._rows[slot]):
            # both stand side by side for a moment
            room = 2 * needed * self._columns * self._dtype.itemsize
            if self._open_bytes + room > self._max_bytes:
                self._forget(slot)
                return
            grown = torch.empty(2 * needed, self._columns, dtype=self._dtype)
            grown[:count] = self._rows[slot][:count]
            self._rows[slot] = grown
        self._rows[slot][count:needed] = hidden
        self._count[slot] = needed

    def _forget(self, slot: int) -> None:
        for each in (self._rows, self._count, self._decoded_from):
            each.pop(slot, None)
