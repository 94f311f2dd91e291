"""How a head's drafts would be accepted, counted on responses that its target has sampled.

Draft and target share the noise of the sample's key, so a drafted token is accepted when the argmax of the head's
logits / T + noise is the response's token. All levels of all anchors come from one unrolled forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from core.records import SampleKey
from engine.decoding.noise import gumbel_noise, key_words
from engine.drafters.head.feature_sequence import FeatureSequence
from learning.heads.head_module import HeadModule
from learning.heads.packed_features import PackedFeatures, num_anchors
from learning.heads.unrolled import unroll

NOISE_ROWS = 32
POSITION_EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"Where groups of positions in the response begin."


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedResponse:
    """What a head drafts along one response."""

    hits: np.ndarray
    "bool [M, K]: from the m-th anchor, the k-th drafted token is the response's, those before it being right"
    first_token: int
    "place in the response of the token that the first anchor drafts first"
    category: str = ""


@torch.no_grad()
def drafted_response(
    head: HeadModule,
    sequence: FeatureSequence,
    key: SampleKey,
    *,
    embedding: Float[Tensor, "V H"],
    temperature: float,
    num_levels: int,
    category: str = "",
) -> DraftedResponse | None:
    """Draft from every anchor of a response that was sampled by `key` at `temperature`; None where there is none."""
    if not num_anchors(sequence):
        return None
    packed = PackedFeatures([sequence], embedding.device)
    states = unroll(head, packed, embedding=embedding, num_levels=num_levels)
    first = packed.spans[0].first_anchor + 2
    positions = np.arange(first, first + packed.num_anchors)
    noise = _noise(head, sequence, key, positions) if temperature > 0.0 else 0.0
    hits = np.zeros((packed.num_anchors, num_levels), dtype=bool)
    for level, state in enumerate(states):
        logits = F.linear(head.norm(state), head.lm_head.weight).cpu() / (temperature or 1.0)
        # level k + 1 of an anchor predicts k tokens further on
        scores = logits + (noise[level : level + len(state)] if isinstance(noise, Tensor) else noise)
        drafted = head.token_ids.cpu()[scores.argmax(-1)]
        hits[: len(state), level] = (drafted == packed.level_targets(level + 1).cpu()).numpy()
    return DraftedResponse(hits=hits, first_token=first - sequence.prompt_length, category=category)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Counts over responses. Level k counts where the levels before it were right."""

    responses: tuple[DraftedResponse, ...]

    @staticmethod
    def of(responses: Sequence[DraftedResponse | None]) -> Acceptance:
        """Of all that drafted anything."""
        return Acceptance(responses=tuple(each for each in responses if each is not None))

    @property
    def num_anchors(self) -> int:
        """Positions that were drafted from."""
        return sum(len(each.hits) for each in self.responses)

    def by_level(self) -> list[float]:
        """Share of the drafts of each level that are accepted; a level that was never reached is left out."""
        levels = self.responses[0].hits.shape[1] if self.responses else 0
        accepted, tried = np.zeros(levels), np.zeros(levels)
        for each in self.responses:
            right = np.cumprod(each.hits, axis=1, dtype=np.int64)
            for level in range(levels):
                # the last anchors have no token to draft at higher levels
                within = right[: max(len(right) - level, 0)]
                tried[level] += len(within) if level == 0 else within[:, level - 1].sum()
                accepted[level] += within[:, level].sum()
        return [float(a / t) for a, t in zip(accepted, tried, strict=True) if t]

    def mean_length(self) -> float:
        """Tokens a decode step emits when chains of all levels are drafted: accepted ones and one of the target's."""
        steps = self._steps()
        return float(np.mean([length for _, length in steps])) if steps else 1.0

    def by_position(self) -> list[tuple[int, float, float]]:
        """Groups of places in the response: where each begins, level 1's acceptance, mean length of steps there."""
        steps = self._steps()
        table = []
        for first, end in zip(POSITION_EDGES, (*POSITION_EDGES[1:], 1 << 62), strict=True):
            hits = [
                each.hits[max(first - each.first_token, 0) : max(end - each.first_token, 0), 0]
                for each in self.responses
            ]
            lengths = [length for place, length in steps if first <= place < end]
            right = np.concatenate(hits) if hits else np.zeros(0)
            if len(right):
                mean = float(np.mean(lengths)) if lengths else 1.0
                table.append((first, float(right.mean()), mean))
        return table

    def by_category(self) -> dict[str, Acceptance]:
        """Of each category alone, in the order of their names."""
        names = sorted({each.category for each in self.responses})
        return {
            name: Acceptance(responses=tuple(each for each in self.responses if each.category == name))
            for name in names
        }

    def _steps(self) -> list[tuple[int, int]]:
        """Decode steps along all responses: the place of the first drafted token, and tokens emitted."""
        steps = []
        for each in self.responses:
            anchor, total = 0, len(each.hits)
            right = np.cumprod(each.hits, axis=1, dtype=np.int64).sum(axis=1).tolist()
            while anchor < total:
                length = 1 + right[anchor]
                # the response's last token may be a drafted one
                steps.append((each.first_token + anchor, min(length, total - anchor)))
                anchor += length
        return steps


def _noise(head: HeadModule, sequence: FeatureSequence, key: SampleKey, positions: np.ndarray) -> Tensor:
    """[M, D], of the draft vocabulary's tokens; a few rows at a time of the whole vocabulary's."""
    words = key_words(key, sequence.token_ids[: sequence.prompt_length])[None]
    ids, vocab_size = head.token_ids.cpu(), head.config.vocab_size
    return torch.cat(
        [
            gumbel_noise(words, positions[None, start : start + NOISE_ROWS], vocab_size)[0][:, ids]
            for start in range(0, len(positions), NOISE_ROWS)
        ]
    )
