"""Between packed tokens and attention's rows: one row of the batch for each (sample, KV head).

Queries, keys and values of a token lie together, KV head by KV head:
    qkv [M, Hkv, queries + 2, E]: the queries that share the head, the key, the value
so that attention takes the queries of single tokens as they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..upload import upload
from .backends import MIN_ROWS


def pack_queries(qkv: Float[Tensor, "M Hkv G E"], batch: int) -> Float[Tensor, "N R E"]:
    """Return the queries by (sample, KV head), rows token by token, padded to MIN_ROWS rows.

    A single token's are taken as they lie where key and value suffice as padding rows.
    """
    heads, lanes, size = qkv.shape[1:]
    shared, n = lanes - 2, qkv.shape[0] // batch
    if n == 1 and lanes >= MIN_ROWS:
        return qkv.view(batch * heads, lanes, size)[:, : max(shared, MIN_ROWS)]
    queries = queries_by_head(qkv[:, :, :shared], batch)
    missing = MIN_ROWS - n * shared
    return queries if missing <= 0 else F.pad(queries, (0, 0, 0, missing))


def queries_by_head(queries: Float[Tensor, "M Hkv S E"], batch: int) -> Float[Tensor, "N R E"]:
    """Return the queries by (sample, KV head), rows token by token."""
    by_sample = queries.unflatten(0, (batch, -1)).transpose(1, 2)
    return by_sample.flatten(2, 3).flatten(0, 1)


def unpack_queries(
    out: Float[Tensor, "N rows E"], batch: int, n: int, num_tokens: int
) -> Float[Tensor, "M HE"]:
    """Return attention outputs token by token, heads behind one another; zeros up to `num_tokens` tokens."""
    heads = out.shape[0] // batch
    # attention kernels of CUDA lay heads behind rows: no view of any batch size
    packed = out.reshape(batch, heads, n, -1).transpose(1, 2).reshape(batch * n, -1)
    missing = num_tokens - batch * n
    return packed if missing == 0 else F.pad(packed, (0, 0, 0, missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRows:
    """Samples with unlike numbers of tokens: linears see the real ones, attention a row for each of B * n.

    Missing tokens borrow their sample's root; what that writes behind the tree is overwritten before it is seen.
    """

    spread: Int[Tensor, " Bn"]
    "packed token of every row"
    packed: Int[Tensor, " M"]
    "row of every packed token"
    counts: np.ndarray
    "tokens of each sample, int64 [B]"

    @staticmethod
    def of(num_tokens: np.ndarray, device: torch.device) -> RaggedRows:
        """Build the maps for `num_tokens[b]` tokens (root included) of n = max(num_tokens) each."""
        first = np.cumsum(num_tokens) - num_tokens
        index = np.arange(int(num_tokens.max()))
        real = index < num_tokens[:, None]
        spread = first[:, None] + np.where(real, index, 0)
        on_device = upload([spread.reshape(-1), np.flatnonzero(real)], device)
        return RaggedRows(
            spread=on_device[0],
            packed=on_device[1],
            counts=num_tokens.astype(np.int64),
        )

    def pack(self, rows: Tensor) -> Tensor:
        """Take the real tokens out of [B * n, ...]."""
        return rows.index_select(0, self.packed)

    def unpack(self, tokens: Tensor) -> Tensor:
        """Give every row of [B * n, ...] its token."""
        return tokens.index_select(0, self.spread)
