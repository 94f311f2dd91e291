"""A target's own responses to prompts, each with the hidden states that a draft head learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from core.config import EngineConfig, SpeculationConfig
from core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from engine.build import build_engine
from engine.drafters.head.feature_sequence import FeatureSequence
from engine.engine import Engine
from learning.heads.target_features import TargetFeatures

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


class Responder:
    """A target with an engine that decodes it plainly, and what listens to its layers."""

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
        self._target, self._taps = target, taps
        self._engine: Engine = build_engine(
            target,
            None,
            engine=EngineConfig(max_running_samples=num_slots, probe=False),
            speculation=SpeculationConfig(policy="off", drafter="none"),
            max_total_tokens=max_total_tokens,
            vocab_size=vocab_size,
        )

    def responses(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seed: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[OwnResponse]:
        """Yield responses as they finish, until all have or `should_stop` says so, asked between decode steps.

        Those that are not finished then are lost. Raises NotFiniteError as `Engine.step`.
        """
        asked: dict[SampleKey, SampleRequest] = {}
        for index, prompt in enumerate(prompts):
            key = SampleKey(run_seed=seed, stream=Stream.BENCH, sample_index=index)
            asked[key] = SampleRequest(key=key, prompt=prompt, sampling=sampling)
        try:
            for request in asked.values():
                self._engine.submit(request)
            with TargetFeatures(self._target, self._taps) as features:
                while self._engine.has_work and not should_stop():
                    for done in self._engine.step():
                        prompt = asked[done.key].prompt
                        sequence = features.of(np.asarray(prompt.token_ids), done.token_ids)
                        yield OwnResponse(key=done.key, prompt=prompt, sequence=sequence)
        finally:
            self._engine.cancel_all()
