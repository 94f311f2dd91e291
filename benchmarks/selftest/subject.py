"""What the self-test decodes: a pair on a device, and prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine

PLAIN = SpeculationConfig(policy="off")
CHAIN = SpeculationConfig(policy="fixed", num_nodes=4)
TREE = SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A pair by its loaders, which return fresh models on the CPU in the type asked for."""

    target: Callable[[str], PreTrainedModel]
    draft: Callable[[str], PreTrainedModel]
    prompts: Sequence[np.ndarray]
    vocab_size: int
    device: torch.device

    def engine(
        self, speculation: SpeculationConfig, dtype: str, *, batch_size: int, new_tokens: int
    ) -> Engine:
        """Build an engine on the device, with the numerics that are the default there."""
        return build_engine(
            self.target(dtype),
            None if speculation.policy == "off" else self.draft(dtype),
            engine=EngineConfig.model_validate(
                {"device": self.device.type, "max_running_samples": batch_size, "probe": False}
            ),
            speculation=speculation,
            max_total_tokens=max(len(prompt) for prompt in self.prompts) + new_tokens,
            vocab_size=self.vocab_size,
        )

    def requests(self, count: int, new_tokens: int, *, one_prompt: bool = False) -> list[SampleRequest]:
        """Sample at T = 1, without stop tokens; prompts in turn, or the first alone."""
        return [
            SampleRequest(
                key=SampleKey(run_seed=5, stream=Stream.BENCH, sample_index=index),
                prompt=Prompt(prompt_id=number, token_ids=np.asarray(self.prompts[number])),
                sampling=SamplingParams(max_new_tokens=new_tokens),
            )
            for index in range(count)
            for number in [0 if one_prompt else index % len(self.prompts)]
        ]
