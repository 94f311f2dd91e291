"""The target's hidden states, set aside by every forward for who learns from them or drafts on them.

A forward calls `see` with each layer's input (and, behind the last layer, its output); those asked for are copied into
rows that stay where they are, so that recorded graphs write there too. Followers hear of them when it is known which
tokens they belong to: behind a prefill, and behind a verification, of the accepted path alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..decoding.running_batch import RunningBatch
from .prefill_plan import PrefillPiece


@runtime_checkable
class HiddenFollower(Protocol):
    """Hears of the hidden states [.., k H] of committed tokens: k taps' side by side."""

    def filled(
        self, tokens: np.ndarray, pieces: Sequence[PrefillPiece], hidden: Float[Tensor, "M kH"]
    ) -> None:
        """Runs of committed tokens have been computed, packed one behind the other; `tokens` are each slot's [S, T].

        The last layer's output is not among them, since a prefill ends before it, unless `HiddenTaps.whole_prefills`.
        """
        ...

    def copied(self, source: int, piece: PrefillPiece) -> None:
        """A run's keys and values were copied from another slot that holds the same tokens: no forward was made."""
        ...

    def verified(
        self,
        batch: RunningBatch,
        hidden: Float[Tensor, "B D kH"],
        token_ids: np.ndarray,
        num_accepted: np.ndarray,
    ) -> None:
        """A decode step was made; its tokens are not yet committed.

        Args:
            batch: as the step found it: the root of sample b stands at position lengths[b] - 1.
            hidden: of root and accepted nodes; entry j is of position lengths[b] - 1 + j, valid up to num_accepted[b].
            token_ids: emitted, [B, D]; entry j follows the position of entry j.
            num_accepted: [B].
        """
        ...

    def moved(self, source: int, target: int) -> None:
        """The sample of slot `source` now stands in slot `target`."""
        ...

    def left(self, slot: int, batch: RunningBatch) -> None:
        """The sample in this slot is about to leave it; it still stands in `batch`."""
        ...


class HiddenTaps:
    """Rows that a model's forwards write hidden states into, and who hears of them."""

    def __init__(
        self,
        layers: Sequence[int],
        *,
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        whole_prefills: bool = False,
    ) -> None:
        """Make the rows.

        Args:
            layers: whose inputs are wanted, from 0, in the order of a row; the number of layers asks for the last
                one's output.
            hidden_size: H.
            max_tokens: of one forward, padding included.
            dtype: of the rows.
            device: of the model.
            whole_prefills: let prefills run the last layer to its end too, for its output.
        """
        self.layers = tuple(layers)
        self.whole_prefills = whole_prefills
        self.followers: list[HiddenFollower] = []
        self._columns: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layers):
            self._columns.setdefault(layer, []).append(index)
        self._values = torch.zeros(max_tokens, len(self.layers), hidden_size, dtype=dtype, device=device)

    def wants(self, layer: int) -> bool:
        """Whether this layer's input is asked for."""
        return layer in self._columns

    def see(self, layer: int, x: Float[Tensor, "M H"]) -> None:
        """Set a layer's input aside, if it is asked for."""
        for column in self._columns.get(layer, ()):
            self._values[: len(x), column].copy_(x)

    def rows(self, num_tokens: int) -> Float[Tensor, "M kH"]:
        """Return what the last forward has set aside; a view until the next one."""
        return self._values[:num_tokens].view(num_tokens, -1)

    def note_filled(self, tokens: np.ndarray, pieces: Sequence[PrefillPiece], num_tokens: int) -> None:
        """Tell the followers of a prefill's forward."""
        for follower in self.followers:
            follower.filled(tokens, pieces, self.rows(num_tokens))

    def note_verified(
        self, batch: RunningBatch, hidden: Tensor, token_ids: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        """Tell the followers of a decode step."""
        for follower in self.followers:
            follower.verified(batch, hidden, token_ids, num_accepted)
