"""The KV pool: keys and values of every running sample, one slot each (design 3.7).

Cells: [L, 2, S, H, C, E], keys before values, each of a sample's tokens behind one another: attention streams them.
What memory is behind them, and when, `engine.cache.kv_memory` says.
Running samples occupy slots 0..B-1; a finished one is replaced by the last, so a batch is a slice and nothing
is gathered per layer. Slot numbers stay inside `engine/`; callers hold sample keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.errors import ModelError
from ..attention.visibility import count_up
from .cuda_memory import MappedMemory
from .cuda_pages import CudaPages
from .kv_memory import (
    KVMemory,
    PagedHostMemory,
    PoolShape,
    WholeMemory,
    copy_slot,
    round_up,
)

CELL_STEP = 8
"Floats of a head's cell are a multiple of this: whole vectors on every processor."
LEAST_REACH = 64
"Draft columns that every policy may count on, however short its trees."


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one model needs: layers, KV heads, head size."""

    num_layers: int
    num_kv_heads: int
    num_heads: int
    head_size: int
    "of a cell: the model's, filled up with zeros to whole vectors (`cell_size`)"

    @staticmethod
    def of(config: Any) -> KVShape:
        """Read the shape from a Hugging Face config. Raises ModelError when it cannot be found.

        What a config says is not always what a model does: the forwards compare it with their tensors.
        """
        tree: Any = config.get_text_config().to_dict()
        num_layers = tree.get("num_hidden_layers") or tree.get("n_layer")
        num_heads = tree.get("num_attention_heads") or tree.get("n_head")
        hidden = tree.get("hidden_size") or tree.get("n_embd")
        num_kv_heads = tree.get("num_key_value_heads") or num_heads
        sizes = {"layers": num_layers, "heads": num_heads, "KV heads": num_kv_heads, "hidden size": hidden}
        for what, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ModelError(
                    f"a '{config.model_type}' model is not supported: expected its config to give {what} as one "
                    f"positive number, got {size!r}; take a model of another family"
                )
        return KVShape(
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=cell_size(tree.get("head_dim") or hidden // num_heads),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in float32."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_size * 4

    def pool_bytes(self, num_slots: int, capacity: int, element_bytes: int = 4) -> int:
        """Bytes of a pool of `num_slots` samples of `capacity` tokens."""
        return num_slots * round_up(capacity) * self.token_bytes // 4 * element_bytes


def cell_size(head_size: int) -> int:
    """Return a head's size in the cache, a multiple of CELL_STEP; what is added holds zeros."""
    return round_up(head_size, CELL_STEP)


class KVPool:
    """Keys and values of all slots. Masked positions stay finite."""

    def __init__(
        self,
        shape: KVShape,
        *,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        reach: int | None = None,
    ) -> None:
        """Lay out the cells.

        Args:
            shape: of the model.
            num_slots: samples at once.
            capacity: tokens of a slot, at least.
            dtype: of the cells.
            device: where they lie.
            reach: tokens that a decode step may put behind the committed ones. Given: memory comes with the
                samples' length, when `hold` asks for it. None: all slots have it from the start.
        """
        self.shape = shape
        self.num_slots = num_slots
        self.device = device
        self.frame_heads = shape.num_kv_heads
        "of what is read and stored: more than are here where other ranks have the rest"
        self.memory = memory_for(
            PoolShape(
                num_layers=shape.num_layers,
                num_slots=num_slots,
                num_kv_heads=shape.num_kv_heads,
                capacity=capacity,
                head_size=shape.head_size,
                dtype=dtype,
            ),
            device,
            paged=reach is not None,
        )
        self.cells = self.memory.cells
        self.capacity = self.cells.shape[4]
        self._reach = self.capacity if reach is None else max(reach, LEAST_REACH)
        size, heads = shape.head_size, shape.num_kv_heads
        self._merged = [layer.flatten(1, 2).unbind() for layer in self.cells]
        # one index for each (key or value, slot, head, token), whatever lies between them
        of_layer, of_value, of_slot, of_head, of_token, _ = (stride // size for stride in self.cells.stride())
        all_rows = self.cells.as_strided((self.cells.numel() // size, size), (size, 1))
        self._writable = [all_rows[layer * of_layer :] for layer in range(shape.num_layers)]
        slots = torch.arange(num_slots, device=device)[:, None, None, None] * of_slot
        head = torch.arange(heads, device=device)[:, None] * of_head
        self._first_row = slots + head + torch.arange(2, device=device) * of_value
        self._row_step = of_token

    def room_behind(self, num_tokens: int) -> int:
        """Return how many tokens a decode step may put behind so many committed ones."""
        return min(self._reach, self.capacity - num_tokens)

    def extents(self, num_tokens: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Return how far a decode step may reach in slots of so many committed tokens."""
        return np.minimum(num_tokens + self._reach, self.capacity)

    def rows(self, slots: Int[Tensor, " M"], positions: Int[Tensor, " M"]) -> Int[Tensor, " MH2"]:
        """Return where `write` puts M tokens: one index per (token, KV head, key or value), for every layer."""
        return (self._first_row[slots, 0] + positions[:, None, None] * self._row_step).flatten()

    def tree_rows(self, start: Int[Tensor, " B"], num_tokens: int) -> Int[Tensor, " MH2"]:
        """Return the same for `num_tokens` tokens from position start[b] on of each slot b."""
        positions = start[:, None] + count_up(num_tokens, self.device)
        return (self._first_row[: len(start)] + positions[..., None, None] * self._row_step).flatten()

    def write(self, layer: int, rows: Int[Tensor, " MH2"], tokens: Float[Tensor, "M Hkv 2 E"]) -> None:
        """Store M tokens' keys and values of one layer. Raises ModelError when they are not of this pool's shape."""
        self.require_cells(tokens.shape[1], tokens.shape[3])
        cells = tokens.reshape(-1, self.shape.head_size).to(self.cells.dtype)
        self._writable[layer].index_put_((rows,), cells)

    def writable(self, layer: int) -> Float[Tensor, "cells E"]:
        """Return the cells that the indices of `rows` and `tree_rows` count, of one layer."""
        return self._writable[layer]

    def require_cells(self, num_kv_heads: int, head_size: int) -> None:
        """Raise ModelError when keys and values of such a shape are not what the cells are laid out for."""
        if (num_kv_heads, head_size) != (self.shape.num_kv_heads, self.shape.head_size):
            raise ModelError(
                f"keys and values of {num_kv_heads} heads of {head_size} do not fit a cache laid out for "
                f"{self.shape.num_kv_heads} heads of {self.shape.head_size}: the model's config and its layers "
                "differ; take a model of another family"
            )

    def view(self, layer: int, first_slot: int, num_slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, length, E] of a run of slots, N = num_slots * Hkv."""
        heads = self.shape.num_kv_heads
        run = slice(first_slot * heads, (first_slot + num_slots) * heads)
        keys, values = self._merged[layer]
        return keys[run, :length], values[run, :length]

    def move_tokens(
        self, slots: Int[Tensor, " M"], sources: Int[Tensor, " M"], targets: Int[Tensor, " M"]
    ) -> None:
        """Copy tokens inside their slots, all layers at once: the accepted path becomes a dense prefix."""
        self.cells[:, :, slots, :, targets] = self.cells[:, :, slots, :, sources]

    def make_dense(
        self, root: Int[Tensor, " B"], path: Int[Tensor, "B D"], moved: Bool[Tensor, "B D"]
    ) -> None:
        """Copy, in slots 0..B-1, the token at root[b] + path[b, i] to root[b] + i wherever `moved` says so."""
        if self.device.type == "cpu":
            slots, level = torch.nonzero(moved, as_tuple=True)
            if len(slots):
                self.move_tokens(slots, root[slots] + path[slots, level], root[slots] + level)
            return
        self.make_dense_unseen(root, path, moved)

    def make_dense_unseen(self, root: Tensor, path: Tensor, moved: Tensor) -> None:
        """Do the same without a look at `moved` on the host: the other tokens are copied onto themselves."""
        batch, levels = path.shape
        step = count_up(levels, self.device)
        sources = root[:, None] + torch.where(moved, path, step)
        slots = count_up(batch, self.device)[:, None].expand(-1, levels)
        self.move_tokens(slots.reshape(-1), sources.reshape(-1), (root[:, None] + step).reshape(-1))

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot over another: a prompt that both have."""
        copy_slot(self.cells, source, target, length)

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of a slot another's, for good: swap with last on finish."""
        self.memory.move(source, target, length)

    def range_of(self, slot: int, start: int, stop: int) -> Float[Tensor, "L 2 H T E"]:
        """Return the cells of a token range, to be read or written; a view."""
        return self.cells[:, :, slot, :, start:stop]

    @property
    def is_dealt(self) -> bool:
        """Whether other ranks have heads of these slots."""
        return self.frame_heads != self.shape.num_kv_heads

    def in_frame(self, frame: np.ndarray) -> Float[Tensor, "L 2 H T E"]:
        """View bytes as cells of all heads, without a copy."""
        cells = torch.from_numpy(frame).view(self.cells.dtype)
        return cells.view(self.shape.num_layers, 2, self.frame_heads, -1, self.shape.head_size)

    def read(self, slot: int, start: int, stop: int) -> Float[Tensor, "L 2 H T E"]:
        """Return the cells of a token range, of all heads; not to be written."""
        return self.range_of(slot, start, stop)

    def store(self, slot: int, start: int, cells: Float[Tensor, "L 2 H T E"]) -> None:
        """Put cells of all heads behind the first `start` tokens of a slot."""
        self.range_of(slot, start, start + cells.shape[3]).copy_(cells)

    def clear(self, slot: int, start: int, stop: int) -> None:
        """Set a token range to zeros."""
        self.range_of(slot, start, stop).zero_()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.num_bytes // (self.num_slots * self.capacity)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots at full length."""
        return self.cells.nbytes // self.shape.num_kv_heads * self.frame_heads


def memory_for(shape: PoolShape, device: torch.device, *, paged: bool) -> KVMemory:
    """Return the memory of a pool."""
    if not paged:
        return WholeMemory(shape, device)
    return PagedHostMemory(shape) if device.type == "cpu" else MappedMemory(shape, CudaPages(device))
