"""The KV pool: keys and values of every running sample, one slot each (design 3.7).

Layout: keys [L, S, H, C, E], values [L, S, H, C, E + VALUE_PAD] (the pad holds ones: see `engine.attention`).
Running samples occupy slots 0..B-1; a finished one is replaced by the last, so a batch is a slice and nothing
is gathered per layer. Slot numbers stay inside `engine/`; callers hold sample keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.configuration_utils import PretrainedConfig

from core.errors import ModelError
from engine.attention import VALUE_PAD

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

    def pool_bytes(self, num_slots: int, capacity: int, element_bytes: int = 4) -> int:
        """Bytes of a pool of `num_slots` samples of `capacity` tokens."""
        per_token = self.num_layers * self.num_kv_heads * (2 * self.head_size + VALUE_PAD)
        return num_slots * round_up(capacity) * per_token * element_bytes


class KVPool:
    """Keys and values of all slots. Memory is zeroed once: masked positions must stay finite."""

    def __init__(
        self, shape: KVShape, *, num_slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.capacity = round_up(capacity)
        self.num_slots = num_slots
        lead = (shape.num_layers, num_slots, shape.num_kv_heads, self.capacity)
        self.keys = torch.zeros(*lead, shape.head_size, dtype=dtype, device=device)
        self.values = torch.ones(*lead, shape.head_size + VALUE_PAD, dtype=dtype, device=device)
        self.values[..., : shape.head_size] = 0
        rows = num_slots * shape.num_kv_heads * self.capacity
        self._key_rows = self.keys.view(shape.num_layers, rows, shape.head_size)
        self._value_rows = self.values.view(shape.num_layers, rows, -1)[..., : shape.head_size]
        self._head_offset = torch.arange(shape.num_kv_heads, device=device) * self.capacity

    def row_index(self, slots: Int[Tensor, " M"], positions: Int[Tensor, " M"]) -> Int[Tensor, " MH"]:
        """Return where `write` puts M tokens: one index per (token, KV head), the same for every layer."""
        first = slots * (self.shape.num_kv_heads * self.capacity) + positions
        return (first[:, None] + self._head_offset).flatten()

    def write(
        self,
        layer: int,
        rows: Int[Tensor, " MH"],
        keys: Float[Tensor, "M Hkv E"],
        values: Float[Tensor, "M Hkv E"],
    ) -> None:
        """Store M tokens' keys and values of one layer."""
        size = self.shape.head_size
        self._key_rows[layer].index_copy_(0, rows, keys.reshape(-1, size).to(self.keys.dtype))
        self._value_rows[layer].index_copy_(0, rows, values.reshape(-1, size).to(self.values.dtype))

    def view(self, layer: int, slots: slice, length: int) -> tuple[Tensor, Tensor]:
        """Return keys [B, Hkv, length, E] and values [B, Hkv, length, E + pad] of a run of slots."""
        return self.keys[layer, slots, :, :length], self.values[layer, slots, :, :length]

    def move_tokens(
        self, slots: Int[Tensor, " M"], sources: Int[Tensor, " M"], targets: Int[Tensor, " M"]
    ) -> None:
        """Copy tokens inside their slots, all layers at once: the accepted path becomes a dense prefix."""
        self.keys[:, slots, :, targets] = self.keys[:, slots, :, sources]
        self.values[:, slots, :, targets] = self.values[:, slots, :, sources]

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot over another: swap with last on finish."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def export(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return copies of a token range: keys and values [L, Hkv, stop - start, E]."""
        size = self.shape.head_size
        return (
            self.keys[:, slot, :, start:stop].clone(),
            self.values[:, slot, :, start:stop, :size].clone(),
        )

    def import_(self, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store an exported token range."""
        stop = start + keys.shape[2]
        self.keys[:, slot, :, start:stop] = keys
        self.values[:, slot, :, start:stop, : self.shape.head_size] = values

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.keys.nbytes + self.values.nbytes


def round_up(length: int, step: int = VIEW_STEP) -> int:
    """Round a length up to a multiple of `step`: few distinct view lengths."""
    return -(-length // step) * step
