"""Noise-coupled verification of a draft tree (design 3.1): the lossless rule in one place.

    A draft child is accepted iff it is the token that the target's rule gives at its parent.
    Descend while one is; where none is, the target's own token is emitted (the bonus token).

Siblings carry different tokens, so the accepted nodes form one path from the root. What is emitted is, by
construction, what plain decoding emits: accepted tokens + 1 bonus token, whatever was drafted.
Words: acceptance rate is accepted / verified draft tokens; mean acceptance length counts the bonus too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..attention.visibility import count_up
from .draft_tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one decode step."""

    num_accepted: Int[Tensor, " B"]
    path: Int[Tensor, "B D"]
    "node numbers of the accepted path, root first; entries beyond num_accepted repeat the last node"
    token_ids: Int[Tensor, "B D"]
    "emitted tokens: entry j is the target's token at path node j; valid up to num_accepted"
    num_accepted_rank2_plus: Int[Tensor, " B"]


def verify(
    choices: Int[Tensor, "B n"], tree: DraftTree, ancestors: Bool[Tensor, "B n n"] | None, max_depth: int
) -> Verdict:
    """Accept the path on which every draft token equals the target's choice at its parent.

    Args:
        choices: the target's token at each node, root first (`engine.decoding.sampling_rule`).
        tree: N = n - 1 draft nodes.
        ancestors: node itself and its ancestors, root included; a chain needs none.
        max_depth: the deepest level of the tree; D = max_depth + 1.
    """
    if not tree.num_nodes:
        none = choices.new_zeros(len(choices))
        return Verdict(
            num_accepted=none,
            path=none[:, None],
            token_ids=choices,
            num_accepted_rank2_plus=none,
        )
    if tree.is_chain or ancestors is None:
        num_accepted = (tree.token_ids == choices[:, :-1]).cumprod(1).sum(1)
        number = count_up(choices.shape[1], choices.device)
        return Verdict(
            num_accepted=num_accepted,
            path=torch.minimum(number, num_accepted[:, None]),
            token_ids=choices,
            num_accepted_rank2_plus=torch.zeros_like(num_accepted),
        )
    if tree.by_kernels:
        of_tree = (tree.token_ids, tree.parents, tree.rank)
        (path, token_ids), counts = torch.ops.rlhfspec.descend(choices, *of_tree, max_depth + 1)
        return Verdict(
            num_accepted=counts[0], path=path, token_ids=token_ids, num_accepted_rank2_plus=counts[1]
        )
    batch, n = choices.shape
    wrong = torch.zeros(batch, n, device=choices.device)
    wrong[:, 1:] = (tree.token_ids != choices.gather(1, tree.parents)).float()
    wrong_above = torch.bmm(ancestors.float(), wrong[..., None]).squeeze(-1)
    accepted = wrong_above == 0
    number = torch.arange(n, device=choices.device)
    last = (accepted * number).amax(1, keepdim=True)
    path = torch.where(accepted, number, n).sort(dim=1).values[:, : max_depth + 1]
    path = torch.minimum(path, last)
    return Verdict(
        num_accepted=accepted[:, 1:].sum(1),
        path=path,
        token_ids=choices.gather(1, path),
        num_accepted_rank2_plus=(accepted[:, 1:] & (tree.rank > 1)).sum(1),
    )
