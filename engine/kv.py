"""The KV pool: keys and values of every running sample, one slot each (design 3.7).

Layout: [L, 2, S, H, C, E], keys before values, each of a sample's tokens behind one another: attention streams them.
Running samples occupy slots 0..B-1; a finished one is replaced by the last, so a batch is a slice and nothing
is gathered per layer. Slot numbers stay inside `engine/`; callers hold sample keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.configuration_utils import PretrainedConfig

from core.errors import ModelError
from engine.visibility import count_up

VIEW_STEP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one model needs: layers, KV heads, head size."""

    num_layers: int
    num_kv_heads: int
    num_heads: int
    head_size: int

    @staticmethod
    def of(config: PretrainedConfig) -> KVShape:
        """Read the shape from a Hugging Face config. Raises ModelError when it cannot be found."""
        tree = config.get_text_config().to_dict()
        num_layers = tree.get("num_hidden_layers") or tree.get("n_layer")
        num_heads = tree.get("num_attention_heads") or tree.get("n_head")
        hidden = tree.get("hidden_size") or tree.get("n_embd")
        if not (num_layers and num_heads and hidden):
            raise ModelError(
                f"cannot read layers, heads and hidden size from a '{config.model_type}' config; "
                "this architecture is not supported"
            )
        return KVShape(
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=tree.get("num_key_value_heads") or num_heads,
            head_size=tree.get("head_dim") or hidden // num_heads,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in float32."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_size * 4

    def pool_bytes(self, num_slots: int, capacity: int, element_bytes: int = 4) -> int:
        """Bytes of a pool of `num_slots` samples of `capacity` tokens."""
        return num_slots * round_up(capacity) * self.token_bytes // 4 * element_bytes


class KVPool:
    """Keys and values of all slots. Memory is zeroed once: masked positions must stay finite."""

    def __init__(
        self, shape: KVShape, *, num_slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.capacity = round_up(capacity)
        self.num_slots = num_slots
        self.device = device
        size, heads = shape.head_size, shape.num_kv_heads
        lead = (shape.num_layers, 2, num_slots, heads, self.capacity)
        self.cells = torch.zeros(*lead, size, dtype=dtype, device=device)
        self._merged = [layer.flatten(1, 2).unbind() for layer in self.cells]
        self._writable = [layer.flatten(0, 3) for layer in self.cells]
        slots = torch.arange(num_slots, device=device)[:, None, None, None]
        head = torch.arange(heads, device=device)[:, None]
        values_behind = torch.arange(2, device=device) * num_slots * heads
        self._first_row = (slots * heads + head + values_behind) * self.capacity

    def rows(self, slots: Int[Tensor, " M"], positions: Int[Tensor, " M"]) -> Int[Tensor, " MH2"]:
        """Return where `write` puts M tokens: one index per (token, KV head, key or value), for every layer."""
        return (self._first_row[slots, 0] + positions[:, None, None]).flatten()

    def tree_rows(self, start: Int[Tensor, " B"], num_tokens: int) -> Int[Tensor, " MH2"]:
        """Return the same for `num_tokens` tokens from position start[b] on of each slot b."""
        positions = start[:, None] + count_up(num_tokens, self.device)
        return (self._first_row[: len(start)] + positions[..., None, None]).flatten()

    def write(self, layer: int, rows: Int[Tensor, " MH2"], tokens: Float[Tensor, "M Hkv 2 E"]) -> None:
        """Store M tokens' keys and values of one layer."""
        cells = tokens.reshape(-1, self.shape.head_size).to(self.cells.dtype)
        self._writable[layer].index_put_((rows,), cells)

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

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot over another: swap with last on finish."""
        self.cells[:, :, target, :, :length] = self.cells[:, :, source, :, :length]

    def range_of(self, slot: int, start: int, stop: int) -> Float[Tensor, "L 2 H T E"]:
        """Return the cells of a token range, to be read or written; a view."""
        return self.cells[:, :, slot, :, start:stop]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.cells.nbytes // (self.num_slots * self.capacity)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.cells.nbytes


def round_up(length: int, step: int = VIEW_STEP) -> int:
    """Round a length up to a multiple of `step`: few distinct view lengths."""
    return -(-length // step) * step
