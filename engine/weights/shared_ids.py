"""A draft model whose tokenizer has a token more or less than the target's: the ids that both have suffice.

What only one has is never drafted. A draft model's config names it (`foreign_token_ids`, as ranges), so that the ids go
with its weights: to instances, trainers and checkpoints. Where the draft model has too few rows it gets rows for
them, since the target's tokens are what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...core.errors import ModelError

if TYPE_CHECKING:
    # takes longer than all the rest of an instance's start
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

FOREIGN_KEY = "foreign_token_ids"
NEVER = -1e9
"A logit that nothing is chosen by; finite, so that 0 times it is 0."


def foreign_of(config: Any, num_ids: int) -> Int[Tensor, " F"] | None:
    """Return the ids below `num_ids` that a draft model of this config never drafts; None: it drafts them all."""
    ids = [number for number in listed(config) if number < num_ids]
    return torch.tensor(ids) if ids else None


def without(logits: Float[Tensor, "... V"], foreign: Int[Tensor, " F"] | None) -> Float[Tensor, "... V"]:
    """Return logits by which no foreign id is chosen; the very same where there are none."""
    return logits if foreign is None else logits.index_fill(-1, foreign.to(logits.device), NEVER)


def listed(config: Any) -> list[int]:
    """The ids that a config names."""
    return [number for begin, end in getattr(config, FOREIGN_KEY, None) or () for number in range(begin, end)]


def foreign_ids(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> list[int]:
    """Return the target's ids that only one of two tokenizers has; none for equal ones.

    Raises ModelError naming the first ids that differ: a token of another id, or an id of another token.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return []
    names, other_names = ({number: token for token, number in each.items()} for each in (ours, theirs))
    differ = sorted(
        {number for number in names.keys() & other_names.keys() if names[number] != other_names[number]}
        | {ours[token] for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]}
    )
    if differ:
        shown = ", ".join(
            f"{number} ({names.get(number)!r} and {other_names.get(number)!r})" for number in differ[:3]
        )
        raise ModelError(
            "draft and target need equal tokenizers, but for tokens that only one of them has; they differ first at id "
            f"{shown}, {len(differ)} ids in all (target {len(ours)} entries, draft {len(theirs)}); "
            "take a draft model of the same family, or speculation.drafter=suffix"
        )
    num_ids = max(names) + 1
    return sorted(number for number in names.keys() ^ other_names.keys() if number < num_ids)


def fit_draft(model: PreTrainedModel, foreign: Iterable[int], *, num_ids: int) -> PreTrainedModel:
    """Name the ids that are never drafted in the draft's config, and give the model rows up to the target's `num_ids`.

    New rows are the mean of the others: no token depends on them. Without foreign ids nothing is changed.
    """
    ids = sorted(foreign)
    if not ids:
        return model
    setattr(model.config, FOREIGN_KEY, _ranges(sorted({*ids, *listed(model.config)})))
    have = int(model.config.get_text_config().vocab_size)
    if have < num_ids:
        # transformers draws new rows at random
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model.resize_token_embeddings(num_ids, mean_resizing=False)
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                    parameter[have:] = parameter[:have].float().mean(dim=0).to(parameter.dtype)
        model.requires_grad_(False)
    return model


def _ranges(ids: list[int]) -> list[list[int]]:
    begins = [0, *(place for place, (left, right) in enumerate(pairwise(ids), 1) if right != left + 1)]
    return [
        [ids[begin], ids[end - 1] + 1] for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True)
    ]
