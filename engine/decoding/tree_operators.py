"""What grows and cuts a draft's tree on a GPU, as operators of torch: one launch each, on CUDA alone.

- `leaders`: of every row of logits and block of the vocabulary the best perturbed scores (`fused_leaders`);
- `grow`: of these the children of a level's nodes and their scores, written into the candidates [3, B, T] (token,
  number of the parent, draft slot) from `offset` on, and the `width` best of them, which the next level expands: token,
  number and parent in their level [3, B, width], score, and which columns each sees;
- `pick`: the best candidates in their order: token, parent, depth, rank and draft slot [5, B, N], and scores;
- `ancestors`: of N nodes and the root, who is above whom or is it, bool [B, n, n];
- `descend`: the path that the target's choices take: its nodes and tokens [2, B, D], how many are accepted and how many
  of those are no first choice of the drafter [2, B].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_here import define


def _leaders_meta(
    logits: Tensor, words: Tensor, divisors: Tensor, factors: Tensor, level: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, _ = logits.shape
    best = divisors.new_empty(batch, rows, 1, count)
    return best, best.to(torch.int64), divisors.new_empty(2, batch, rows, 1)


def _grow_meta(best: Tensor, *args: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    seen, candidates, width = args[4], args[5], args[8]
    batch, columns = len(best), 0 if seen is None else seen.shape[2]  # type: ignore[union-attr]
    following = candidates.new_empty(3, batch, width)  # type: ignore[union-attr]
    marks = torch.empty(batch, width, columns + width, dtype=torch.bool, device=best.device)  # type: ignore[call-overload,operator]
    return following, best.new_empty(batch, width), marks  # type: ignore[call-overload]


def _pick_meta(token_ids: Tensor, *args: Tensor | int) -> tuple[Tensor, Tensor]:
    scores, count = args[-2:]
    batch = len(token_ids)
    return token_ids.new_empty(5, batch, count), scores.new_empty(batch, count)  # type: ignore[call-overload,union-attr]


def _ancestors_meta(parents: Tensor) -> Tensor:
    batch, nodes = parents.shape
    return parents.new_empty(batch, nodes + 1, nodes + 1, dtype=torch.bool)


def _descend_meta(choices: Tensor, *args: Tensor | int) -> tuple[Tensor, Tensor]:
    return choices.new_empty(2, len(choices), args[-1]), choices.new_empty(2, len(choices))  # type: ignore[call-overload]


for _schema, _meta in (
    (
        "leaders(Tensor logits, Tensor words, Tensor divisors, Tensor factors, int level, int count) "
        "-> (Tensor, Tensor, Tensor)",
        _leaders_meta,
    ),
    (
        "grow(Tensor best, Tensor best_ids, Tensor sums, Tensor? frontier, Tensor? frontier_score, "
        "Tensor? frontier_seen, Tensor(a!) candidates, Tensor(b!) scores, int offset, int width) "
        "-> (Tensor, Tensor, Tensor)",
        _grow_meta,
    ),
    (
        "pick(Tensor token_ids, Tensor parents, Tensor slots, Tensor depth, Tensor rank, Tensor scores, int count) "
        "-> (Tensor, Tensor)",
        _pick_meta,
    ),
    ("ancestors(Tensor parents) -> Tensor", _ancestors_meta),
    (
        "descend(Tensor choices, Tensor token_ids, Tensor parents, Tensor rank, int levels) -> (Tensor, Tensor)",
        _descend_meta,
    ),
):
    define(_schema, "decoding.tree_cuda", _meta)
