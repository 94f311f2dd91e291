"""A head unrolled over several levels, as it drafts, for all anchors of packed sequences at once.

Level 1 of an anchor is its own cell, made from the target's hidden states. Level k reads the head's own output of level
k - 1 in the place of hidden states. Its query attends to the cells of the true past, up to the anchor, and to the
anchor's own levels 2 to k: what the drafter sees when it drafts k tokens from there and all were right.

Attention works by pieces of a few milliseconds; its scores are computed anew for the gradient instead of being held.

Source: Li et al. 2025, 'EAGLE-3', section 3.2 (training-time test); Dao et al. 2022, 'FlashAttention', section 3.1
(recomputation in the backward pass).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from .features import PackedFeatures, Span
from .head import HeadModule
from .stoppable import Products, pieces_of


@dataclass(slots=True)
class _OwnLevel:
    """Keys and values that a level of its own adds, of its anchors, by sequence."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def unroll(
    head: HeadModule,
    packed: PackedFeatures,
    *,
    embedding: Float[Tensor, "V H"],
    num_levels: int,
    products: Products | None = None,
) -> list[Float[Tensor, "R H"]]:
    """Return each level's layer outputs, before `norm`, of the anchors that `packed.level_anchors` names.

    `lm_head(norm(.))` of level k predicts the token k + 1 behind the anchor's cell.
    """
    products = products or Products()
    hidden = products.linear(packed.taps, head.fc.weight)
    cells = _inputs(head, F.embedding(packed.cell_tokens, embedding), hidden)
    table = head.rotation.table(packed.positions)
    keys = head.rotation.turn(
        _heads(head, products.linear(cells, head.midlayer.self_attn.k_proj.weight)), table
    )
    values = _heads(head, products.linear(cells, head.midlayer.self_attn.v_proj.weight))
    anchors = packed.anchor_cells
    x, state = cells[anchors], hidden[anchors]
    turned = table[0][anchors], table[1][anchors]
    own: list[_OwnLevel] = []
    states: list[Tensor] = []
    for level in range(1, num_levels + 1):
        if level > 1:
            # the last anchor of every sequence has no further token to predict
            going_on = _first_of_each(packed.level_counts(level - 1), packed.level_counts(level))
            state = states[-1][going_on.to(state.device)]
            if not len(state):
                break
            x = _inputs(head, F.embedding(packed.level_tokens(level), embedding), state)
            turned = head.rotation.table(packed.level_positions(level))
            own.append(_own_level(head, x, turned, packed.level_counts(level), products))
        query = _heads(head, products.linear(x, head.midlayer.self_attn.q_proj.weight))
        query = head.rotation.turn(query, turned)
        attended = _attend(query, keys, values, own, packed.spans, packed.level_counts(level), products)
        states.append(_after_attention(head, state, attended, products))
    return states


def _inputs(head: HeadModule, embedded: Tensor, hidden: Tensor) -> Float[Tensor, "R double"]:
    layer = head.midlayer
    return torch.cat([layer.input_layernorm(embedded.float()), layer.hidden_norm(hidden)], dim=-1)


def _heads(head: HeadModule, x: Tensor) -> Float[Tensor, "R heads E"]:
    return x.view(len(x), -1, head.config.head_size)


def _own_level(
    head: HeadModule, x: Tensor, turned: tuple, counts: Sequence[int], products: Products
) -> _OwnLevel:
    attention = head.midlayer.self_attn
    key = head.rotation.turn(_heads(head, products.linear(x, attention.k_proj.weight)), turned)
    value = _heads(head, products.linear(x, attention.v_proj.weight))
    return _OwnLevel(keys=list(key.split(list(counts))), values=list(value.split(list(counts))))


def _after_attention(head: HeadModule, state: Tensor, attended: Tensor, products: Products) -> Tensor:
    layer = head.midlayer
    state = state + products.linear(attended, layer.self_attn.o_proj.weight)
    x = layer.post_attention_layernorm(state)
    inner = F.silu(products.linear(x, layer.mlp.gate_proj.weight)) * products.linear(
        x, layer.mlp.up_proj.weight
    )
    return state + products.linear(inner, layer.mlp.down_proj.weight)


def _attend(
    query: Float[Tensor, "R heads E"],
    keys: Float[Tensor, "N kv E"],
    values: Float[Tensor, "N kv E"],
    own: Sequence[_OwnLevel],
    spans: Sequence[Span],
    counts: Sequence[int],
    products: Products,
) -> Float[Tensor, "R attended"]:
    parts = []
    size = query.shape[-1]
    for index, (span, part) in enumerate(zip(spans, query.split(list(counts)), strict=True)):
        if len(part):
            none = part.new_zeros(len(part), keys.shape[1], 0, size)
            own_keys = [level.keys[index][: len(part), :, None] for level in own]
            own_values = [level.values[index][: len(part), :, None] for level in own]
            seen = Seen(
                keys=keys[span.cells],
                values=values[span.cells],
                own_keys=torch.cat([none, *own_keys], dim=2),
                own_values=torch.cat([none, *own_values], dim=2),
            )
            parts.append(attend(products, part, seen, span.first_anchor))
    return torch.cat(parts)


def _first_of_each(before: Sequence[int], now: Sequence[int]) -> Int[Tensor, " R"]:
    """Rows of the first `now` of every sequence's, which had `before`."""
    starts = [sum(before[:index]) for index in range(len(before))]
    return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, now, strict=True)])


PIECE_SCORES = 1 << 18
"Of one piece, all attention heads together: some milliseconds of a core for its gradient."
LEAST_ROWS = 4
"Of a piece, however long the past."


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Keys and values that the anchors of one stretch attend to; L is how many own levels each has."""

    keys: Float[Tensor, "n kv E"]
    "of the sequence's cells from its first"
    values: Float[Tensor, "n kv E"]
    own_keys: Float[Tensor, "m kv L E"]
    own_values: Float[Tensor, "m kv L E"]


def attend(
    products: Products, query: Float[Tensor, "m heads E"], seen: Seen, first_anchor: int
) -> Float[Tensor, "m attended"]:
    """Return what each anchor's heads read, side by side.

    The query of row i sees the cells up to `first_anchor` + i, and its own levels. A look is taken before every piece,
    forward and backward; raises Stopped.
    """
    tensors = (seen.keys, seen.values, seen.own_keys, seen.own_values)
    return _Attend.apply(products, first_anchor, query, *tensors)  # type: ignore[return-value]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, first_anchor: int, *tensors: Tensor) -> Tensor:
        ctx.products, ctx.first_anchor = products, first_anchor
        ctx.save_for_backward(*tensors)
        parts = []
        for rows, cells in _pieces(first_anchor, tensors[0], tensors[1]):
            products.look()
            parts.append(_attend_piece(first_anchor + rows.start, *_cut(tensors, rows, cells)))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors = ctx.saved_tensors
        found = [torch.zeros_like(each) for each in tensors]
        for rows, cells in _pieces(ctx.first_anchor, tensors[0], tensors[1]):
            ctx.products.look()
            inputs = [each.detach().requires_grad_() for each in _cut(tensors, rows, cells)]
            with torch.enable_grad():
                attended = _attend_piece(ctx.first_anchor + rows.start, *inputs)
            gradients = torch.autograd.grad(attended, inputs, grads[0][rows])
            for total, gradient in zip(_cut(found, rows, cells), gradients, strict=True):
                total += gradient
        return None, None, *found


def _pieces(first_anchor: int, query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of queries, and the cells that any of them sees."""
    num_rows = max(LEAST_ROWS, PIECE_SCORES // (query.shape[1] * len(keys)))
    for rows in pieces_of(len(query), num_rows):
        yield rows, slice(0, first_anchor + rows.stop)


def _cut(tensors: Any, rows: slice, cells: slice) -> list[Tensor]:
    query, keys, values, own_keys, own_values = tensors
    return [query[rows], keys[cells], values[cells], own_keys[rows], own_values[rows]]


def _attend_piece(
    first_anchor: int,
    query: Float[Tensor, "m heads E"],
    keys: Float[Tensor, "n kv E"],
    values: Float[Tensor, "n kv E"],
    own_keys: Float[Tensor, "m kv L E"],
    own_values: Float[Tensor, "m kv L E"],
) -> Float[Tensor, "m attended"]:
    num, heads, size = query.shape
    cells, kv = keys.shape[:2]
    # a group of queries shares keys and values: [kv, m, group, E], and with its rows and heads joined
    grouped = (query * size**-0.5).view(num, kv, heads // kv, size).transpose(0, 1)
    joined = grouped.reshape(kv, -1, size)
    scores = (joined @ keys.permute(1, 2, 0)).view(kv, num, -1, cells)
    place = torch.arange(cells, device=query.device)
    hidden = place > first_anchor + place[:num, None]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    of_own = grouped @ own_keys.permute(1, 0, 3, 2)
    weights = torch.cat([scores, of_own], dim=-1).softmax(dim=-1)
    attended = weights[..., :cells].reshape(kv, -1, cells) @ values.transpose(0, 1)
    attended = attended.view(kv, num, -1, size) + weights[..., cells:] @ own_values.transpose(0, 1)
    return attended.transpose(0, 1).reshape(num, heads * size)
