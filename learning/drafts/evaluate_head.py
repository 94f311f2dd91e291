"""What a head's drafts are worth on prompts that it has not seen: acceptance on the target's own responses to them.

Draft and target share the noise of the sample's key, so a drafted token is accepted when the argmax of the head's
logits / T + noise is the response's token. All levels of all anchors come from one unrolled forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ...core.config import EngineConfig, SpeculationConfig
from ...core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from ...engine.build import build_engine
from ...engine.decoding.noise import gumbel_noise, key_words
from ...engine.drafters.head.feature_recorder import FeatureSequence
from ...engine.drafters.head.head_weights import HeadWeights, require_fit
from ...engine.engine import Engine
from ...engine.weights.causal_lm import PreTrainedModel
from .features import PackedFeatures, num_anchors, record_features
from .head import HeadModule, TargetParts
from .unrolled import unroll

Tick = Callable[[str, float], None]


def evaluate_head(
    target: PreTrainedModel,
    head: HeadWeights,
    prompts: Sequence[Prompt],
    *,
    samplings: Sequence[SamplingParams],
    vocab_size: int,
    num_levels: int,
    seed: int = 0,
    category_field: str | None = None,
    progress: Tick = lambda stage, share: None,
) -> list[Acceptance]:
    """Return the acceptance of a head's chains at each of some samplings, of responses sampled so.

    `category_field` names a further column of the prompts (`Prompt.fields`) that they are grouped by.
    Raises ModelError when the head is of another target, and as `own_responses.Responder`.
    """
    parts = TargetParts.of(target, head.config.tapped_layers)
    require_fit(head.config, target.config)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    responder = Responder(
        target,
        parts.taps,
        vocab_size=vocab_size,
        max_total_tokens=longest + max(sampling.max_new_tokens for sampling in samplings),
    )
    module = HeadModule(head).to(parts.embedding.device)
    found = []
    for place, sampling in enumerate(samplings):
        drafted = []
        for response in responder.responses(prompts, sampling, seed=seed):
            drafted.append(
                drafted_response(
                    module,
                    response.sequence,
                    response.key,
                    embedding=parts.embedding,
                    temperature=sampling.temperature,
                    num_levels=num_levels,
                    category=str(response.prompt.fields[category_field]) if category_field else "",
                )
            )
            done = (place + len(drafted) / len(prompts)) / len(samplings)
            progress(f"temperature {sampling.temperature:g}", done)
        found.append(Acceptance.of(drafted))
    return found


NOISE_ROWS = 32
NO_RANK = 1 << 40
POSITION_EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"Where groups of positions in the response begin."


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedResponse:
    """What a head drafts along one response."""

    ranks: np.ndarray
    """int64 [M, K]: place of the response's token among the head's scores with noise, from 0, at each level from each
    anchor, those before it being right; NO_RANK where it is not in the draft vocabulary, or the response has ended"""
    first_token: int
    "place in the response of the token that the first anchor drafts first"
    category: str = ""

    @property
    def hits(self) -> np.ndarray:
        """Whether the token that a chain drafts is the response's, bool [M, K]."""
        return self.ranks == 0


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
    ranks = np.full((packed.num_anchors, num_levels), NO_RANK, dtype=np.int64)
    ids = head.token_ids.cpu()
    for level, state in enumerate(states):
        logits = F.linear(head.norm(state), head.lm_head.weight).cpu() / (temperature or 1.0)
        # level k + 1 of an anchor predicts k tokens further on
        scores = logits + (noise[level : level + len(state)] if isinstance(noise, Tensor) else noise)
        ranks[: len(state), level] = _ranks(scores, ids, packed.level_targets(level + 1).cpu())
    return DraftedResponse(ranks=ranks, first_token=first - sequence.prompt_length, category=category)


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
        return _mean([length for _, length in self._steps(self._chain())])

    def tree_length(self, num_nodes: int) -> float:
        """The same with the best fixed tree of so many nodes; one that grows by its scores does no worse as a rule.

        A fixed tree offers the same ranks of the head's scores at every step (Chen et al. 2024, 'Sequoia'); the best is
        taken on the very responses that are counted.
        """
        return _mean([length for _, length in self._steps(self.best_tree(num_nodes))])

    def best_tree(self, num_nodes: int) -> list[tuple[int, ...]]:
        """Paths of ranks, the likeliest to be the response's over all anchors: parents come before children."""
        counts: Counter[tuple[int, ...]] = Counter()
        for each in self.responses:
            for row in each.ranks:
                for depth in range(1, len(row) + 1):
                    path = row[:depth].tolist()
                    if max(path) >= num_nodes:
                        break
                    counts[tuple(path)] += 1
        # a parent counts no less than its child, so the likeliest paths are a tree
        return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:num_nodes]

    def by_position(self) -> list[tuple[int, float, float]]:
        """Groups of places in the response: where each begins, level 1's acceptance, mean length of steps there."""
        steps = self._steps(self._chain())
        table = []
        for first, end in zip(POSITION_EDGES, (*POSITION_EDGES[1:], 1 << 62), strict=True):
            hits = [
                each.hits[max(first - each.first_token, 0) : max(end - each.first_token, 0), 0]
                for each in self.responses
            ]
            lengths = [length for place, length in steps if first <= place < end]
            right = np.concatenate(hits) if hits else np.zeros(0)
            if len(right):
                table.append((first, float(right.mean()), _mean(lengths)))
        return table

    def by_category(self) -> dict[str, Acceptance]:
        """Of each category alone, in the order of their names."""
        names = sorted({each.category for each in self.responses})
        return {
            name: Acceptance(responses=tuple(each for each in self.responses if each.category == name))
            for name in names
        }

    def _chain(self) -> list[tuple[int, ...]]:
        levels = self.responses[0].ranks.shape[1] if self.responses else 0
        return [(0,) * depth for depth in range(1, levels + 1)]

    def _steps(self, tree: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
        """Decode steps along all responses: the place of the first drafted token, and tokens emitted."""
        nodes, steps = set(tree), []
        for each in self.responses:
            anchor, total = 0, len(each.ranks)
            while anchor < total:
                row = each.ranks[anchor].tolist()
                length = 1
                while length <= len(row) and tuple(row[:length]) in nodes:
                    length += 1
                # the response's last token may be a drafted one
                steps.append((each.first_token + anchor, min(length, total - anchor)))
                anchor += length
        return steps


def _mean(lengths: Sequence[int]) -> float:
    return float(np.mean(lengths)) if lengths else 1.0


def _ranks(scores: Float[Tensor, "R D"], ids: Int[Tensor, " D"], tokens: Int[Tensor, " R"]) -> np.ndarray:
    """How many of the draft vocabulary score higher than each row's token; of equal ones the lower id is first."""
    places = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    own = scores.gather(1, places[:, None])
    lower = torch.arange(len(ids)) < places[:, None]
    ranks = ((scores > own) | ((scores == own) & lower)).sum(-1)
    # nothing is higher than what is no number
    ranked = (ids[places] == tokens) & ~scores.isnan().any(-1)
    return torch.where(ranked, ranks, NO_RANK).numpy()


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


SLOTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnResponse:
    """A response that the target sampled, by a key that names its noise."""

    key: SampleKey
    prompt: Prompt
    sequence: FeatureSequence

    @property
    def num_tokens(self) -> int:
        """Of the response."""
        return self.sequence.num_response_tokens


MAX_BYTES = 1 << 32
"Of what is being recorded: far more than SLOTS responses have. What has finished is taken at once."


class Responder:
    """A target with an engine that decodes it plainly, and what records its hidden states meanwhile."""

    def __init__(
        self,
        target: PreTrainedModel,
        taps: tuple[int, ...],
        *,
        vocab_size: int,
        max_total_tokens: int,
        num_slots: int = SLOTS,
    ) -> None:
        """Raises as `build_engine`."""
        self._engine: Engine = build_engine(
            target,
            None,
            engine=EngineConfig(max_running_samples=num_slots, probe=False),
            speculation=SpeculationConfig(policy="off", drafter="none"),
            max_total_tokens=max_total_tokens,
            vocab_size=vocab_size,
        )
        self._recorder = record_features(self._engine, taps, max_bytes=MAX_BYTES)

    def responses(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seed: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[OwnResponse]:
        """Yield responses as they finish, until all have or `should_stop` says so, asked between decode steps.

        Those that are not finished then are lost, and those of next to no tokens left out. Raises NotFiniteError as
        `Engine.step`.
        """
        asked: dict[SampleKey, SampleRequest] = {}
        for index, prompt in enumerate(prompts):
            key = SampleKey(run_seed=seed, stream=Stream.BENCH, sample_index=index)
            asked[key] = SampleRequest(key=key, prompt=prompt, sampling=sampling)
        try:
            for request in asked.values():
                self._engine.submit(request)
            while self._engine.has_work and not should_stop():
                done = self._engine.step()
                recorded = {sequence.token_ids.tobytes(): sequence for sequence in self._recorder.take()}
                for completion in done:
                    prompt = asked[completion.key].prompt
                    text = np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int64)
                    sequence = recorded.get(text.tobytes())
                    if sequence is not None:
                        yield OwnResponse(key=completion.key, prompt=prompt, sequence=sequence)
        finally:
            self._engine.cancel_all()
