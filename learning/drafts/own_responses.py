"""A target's own responses to prompts, each with the hidden states that a draft head learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.drafters.head.feature_sequence import FeatureSequence
from rlhfspec.engine.drafters.head.tapping import record_features
from rlhfspec.engine.engine import Engine

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
