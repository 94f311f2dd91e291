"""Rollouts as padded tensors, in the order of their sample index and never of their arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.errors import NumericsError
from ...core.records import Completion, FinishReason, Rollout
from .batching import PackedSequences, pad_right


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """One update's material. `B` responses, `R` sampled tokens, `T` prompt and response tokens.

    Row-major, `mask` [B, R] and `where` [B, T - 1] select the same tokens in the same order: those the policy sampled.
    What an environment gave in between is context only: in `ids`, and in nothing that is [B, R]. So the last token of a
    turn is followed, for advantages as for returns, by the first sampled one of the next.
    """

    sample_indices: tuple[int, ...]
    lengths: tuple[int, ...]
    "prompt + response tokens"
    prompt_lengths: tuple[int, ...]
    ids: Int[Tensor, "B T"]
    where: Bool[Tensor, "B S"]
    mask: Bool[Tensor, "B R"]
    old_logprobs: Float[Tensor, "B R"]
    sampler_logprobs: Float[Tensor, "B R"]
    "as the engine computed them, unfiltered; the old ones too, until the trainer's own take their place"
    sampling_logprobs: Float[Tensor, "B R"]
    weight_versions: Int[Tensor, "B R"]
    "of the weights that each token was sampled from; 0 off the mask"
    rewards: Float[Tensor, " B"]
    group_ids: Int[Tensor, " B"]
    paid: Float[Tensor, "B R"]
    "what of `rewards` a token is paid itself, where that is known; the rest is the last one's"
    parts: Float[Tensor, "B K"]
    "of a mixture, where each is compared by itself; NaN: does not apply"
    truncated: Bool[Tensor, " B"]
    "responses that the limit of new tokens cut off"
    teacher_prompts: tuple[tuple[int, ...], ...] | None = None
    "token ids of what a teacher reads in the prompts' place; None: the same"

    def sequence(self, row: int) -> Int[np.ndarray, " length"]:
        """A sample's prompt and response."""
        return self.ids[row, : self.lengths[row]].numpy()

    def packed(self, rows: Sequence[int], *, whole: bool = False) -> PackedSequences:
        """Some samples as a tree; their sampled tokens are to be predicted, sample by sample in this order.

        `whole`: what an environment gave in between, too.
        """
        apart = None
        if self.teacher_prompts is not None:
            # what follows other words to the teacher is another token to it
            kinds = {prompt: kind for kind, prompt in enumerate(dict.fromkeys(self.teacher_prompts))}
            apart = [kinds[self.teacher_prompts[row]] for row in rows]
        marks = [self._of_response(row) if whole else self._predicted(row) for row in rows]
        return PackedSequences.of([self.sequence(row) for row in rows], marks, apart)

    def sampled(self, rows: Sequence[int]) -> Bool[Tensor, " M"]:
        """Which of the response tokens of some samples the policy sampled, sample by sample."""
        return torch.cat(
            [self.where[row, self.prompt_lengths[row] - 1 : self.lengths[row] - 1] for row in rows]
        )

    def packed_for_teacher(self, rows: Sequence[int]) -> PackedSequences:
        """The same with what a teacher reads in the prompts' place; the same tokens are to be predicted."""
        assert self.teacher_prompts is not None, "a teacher without prompts of its own reads the student's"
        sequences, learned = [], []
        for row in rows:
            prompt, start = np.array(self.teacher_prompts[row], dtype=np.int64), self.prompt_lengths[row]
            sequences.append(np.concatenate([prompt, self.sequence(row)[start:]]))
            learned.append(np.append(np.zeros(len(prompt), dtype=bool), self._predicted(row)[start:]))
        return PackedSequences.of(sequences, learned)

    def _predicted(self, row: int) -> Bool[np.ndarray, " length"]:
        """Which tokens of a sample the policy sampled."""
        return np.append(False, self.where[row, : self.lengths[row] - 1].numpy())

    def _of_response(self, row: int) -> Bool[np.ndarray, " length"]:
        return np.arange(self.lengths[row]) >= self.prompt_lengths[row]

    @property
    def num_tokens(self) -> int:
        """Number of sampled response tokens."""
        return int(self.mask.sum())


def collate(rollouts: Sequence[Rollout], *, pad_token_id: int, parts: Sequence[str] = ()) -> Experience:
    """Order by `key.sample_index` and pad; `parts`: of a mixture of rewards, each to be compared by itself.

    Raises NumericsError naming the sample when a reward or log-probability is not finite, or a
    response is empty; ValueError when two rollouts have the same key or there are none.
    """
    if not rollouts:
        raise ValueError("an update needs at least one rollout, got none")
    ordered = sorted(rollouts, key=lambda rollout: rollout.completion.key.sample_index)
    indices = tuple(rollout.completion.key.sample_index for rollout in ordered)
    if len(set(indices)) != len(indices):
        raise ValueError("two rollouts of one update have the same sample index; each must be new")
    for rollout in ordered:
        _check(rollout)
    prompts = [rollout.prompt.token_ids for rollout in ordered]
    responses = [rollout.completion.token_ids for rollout in ordered]
    ids, real = pad_right(
        [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)], pad_token_id=pad_token_id
    )
    chosen = [rollout.completion.is_sampled for rollout in ordered]
    learned, _ = pad_right(
        [np.concatenate([np.zeros(len(p), dtype=np.int64), s]) for p, s in zip(prompts, chosen, strict=True)],
        pad_token_id=0,
    )
    where = real[:, 1:] & (learned[:, 1:] == 1)
    _, mask = pad_right([ids[s] for ids, s in zip(responses, chosen, strict=True)], pad_token_id=pad_token_id)
    policy = [r.completion.policy_logprobs[s] for r, s in zip(ordered, chosen, strict=True)]
    sampling = [r.completion.sampling_logprobs[s] for r, s in zip(ordered, chosen, strict=True)]
    versions = [token_versions(r.completion)[s] for r, s in zip(ordered, chosen, strict=True)]
    weight_versions = torch.zeros(mask.shape, dtype=torch.int64)
    weight_versions[mask] = torch.from_numpy(np.concatenate(versions))
    return Experience(
        sample_indices=indices,
        lengths=tuple(len(p) + len(r) for p, r in zip(prompts, responses, strict=True)),
        prompt_lengths=tuple(len(prompt) for prompt in prompts),
        ids=ids,
        where=where,
        mask=mask,
        old_logprobs=_padded(policy, mask),
        sampler_logprobs=_padded(policy, mask),
        sampling_logprobs=_padded(sampling, mask),
        weight_versions=weight_versions,
        rewards=torch.tensor([rollout.reward.value for rollout in ordered], dtype=torch.float32),
        paid=_padded([_tokens(rollout) for rollout in ordered], mask),
        parts=torch.tensor(
            [[rollout.reward.parts.get(name, math.nan) for name in parts] for rollout in ordered],
            dtype=torch.float64,
        ),
        group_ids=torch.tensor([rollout.completion.group_id for rollout in ordered]),
        truncated=torch.tensor(
            [rollout.completion.finish_reason is FinishReason.LENGTH for rollout in ordered]
        ),
        # of a source that says nothing else to its teacher
        teacher_prompts=tuple(
            one.prompt.teacher_ids or tuple(one.prompt.token_ids.tolist()) for one in ordered
        )
        if any(rollout.prompt.teacher_ids for rollout in ordered)
        else None,
    )


def token_versions(completion: Completion) -> np.ndarray:
    """Weight version of each response token, int64 [T]. Raises NumericsError naming a sample whose spans are no list.

    Spans begin at position 0 and each begins after the one before; a later version may begin anywhere.
    """
    firsts = np.array([span.first_position for span in completion.weight_spans], dtype=np.int64)
    versions = np.array([span.weight_version for span in completion.weight_spans], dtype=np.int64)
    if not len(firsts) or firsts[0] != 0 or (np.diff(firsts) <= 0).any():
        raise NumericsError(
            f"sample {completion.key.sample_index} (prompt {completion.prompt_id}): weight spans begin at positions "
            f"{firsts.tolist()[:8]}; expected 0 first and then ascending ones"
        )
    return versions[np.searchsorted(firsts, np.arange(completion.num_tokens), side="right") - 1]


def _padded(rows: Sequence[np.ndarray], mask: Tensor) -> Tensor:
    out = torch.zeros(mask.shape, dtype=torch.float32)
    out[mask] = torch.from_numpy(np.concatenate(rows).astype(np.float32))
    return out


def _tokens(rollout: Rollout) -> np.ndarray:
    return np.array(rollout.reward.tokens or [0.0] * rollout.completion.num_sampled_tokens)


def _check(rollout: Rollout) -> None:
    completion = rollout.completion
    where = f"sample {completion.key.sample_index} (prompt {completion.prompt_id})"
    if not completion.is_sampled.any():
        raise NumericsError(f"{where}: the response is empty; expected at least the end token")
    if rollout.reward.tokens and len(rollout.reward.tokens) != completion.num_sampled_tokens:
        raise NumericsError(
            f"{where}: the reward has {len(rollout.reward.tokens)} numbers for tokens, expected one for each of the "
            f"{completion.num_sampled_tokens} that were sampled"
        )
    named = {
        "reward": np.array([rollout.reward.value, *rollout.reward.tokens]),
        "policy_logprobs": completion.policy_logprobs,
        "sampling_logprobs": completion.sampling_logprobs,
    }
    for name, values in named.items():
        if not np.isfinite(values).all():
            raise NumericsError(f"{where}: {name} is not finite; an update must not go on with it")
